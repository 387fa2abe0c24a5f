//! P7: requests to the API server: for an object, and when there is nothing to do.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::{
    proxy::{Credential, Entry, Proxy, Verb},
    resource::Resource,
};

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    system::{Operator, System, Work},
};

const OBJECTS: usize = 200;
/// How long nobody should ask anything.
const QUIET: Duration = Duration::from_secs(20);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let mut quiet = BTreeMap::<_, Vec<_>>::new();
    for (kind, most) in [(Resource::EMAIL, 1.0), (Resource::JOB, 2.0)] {
        let (mut writes, mut reads) = (BTreeMap::new(), BTreeMap::new());
        // Those whose clients speak to the fault proxy, which counts.
        for system in [System::Berth, System::KubeRs] {
            let bed = Bed::new("requests").await?;
            if system == System::Berth {
                bed.plugin(kind).await?;
            }
            let control = bed.cluster.plane().control();
            let proxy = Proxy::start(&control.config()).await?;
            let kubeconfig = proxy.kubeconfig(bed.folder(), Credential::Token(control.admin_token()))?;
            let mut operator = Operator::synced(&bed, system, &Work { kubeconfig: Some(kubeconfig), ..Work::of(kind) }).await?;
            settled_down(&proxy).await;
            let mark = proxy.mark();
            bed.fill(kind, OBJECTS).await?;
            bed.until_all_settled(kind).await;
            settled_down(&proxy).await;
            let of_kind = |entry: &&Entry| entry.seen.path.contains(kind.plural);
            let seen = proxy.since(mark);
            let (written, read): (Vec<_>, Vec<_>) =
                seen.iter().filter(of_kind).filter(|entry| entry.seen.verb != Verb::Watch).partition(|entry| entry.seen.writes());
            #[expect(clippy::cast_precision_loss, reason = "a number of requests")]
            let each = |requests: &[&Entry]| vec![requests.len() as f64 / OBJECTS as f64];
            writes.insert(system, each(&written));
            reads.insert(system, each(&read));
            // What a busy time leaves to be said of it is said by then.
            tokio::time::sleep(QUIET).await;
            let mark = proxy.mark();
            tokio::time::sleep(QUIET).await;
            // Whoever leads says so every two seconds; a watch that ends is opened again.
            let asked = proxy.since(mark);
            let other: Vec<_> =
                asked.iter().filter(|entry| !entry.seen.path.contains("/leases/") && entry.seen.verb != Verb::Watch).collect();
            eprintln!("P7: {system:>18}: {:?} writes, {:?} reads, {} requests when quiet", writes[&system], reads[&system], other.len());
            #[expect(clippy::cast_precision_loss, reason = "a number of requests")]
            quiet.entry(system).or_default().push(other.len() as f64);
            operator.kill();
        }
        figures.push(Figure::new(
            "P7",
            &format!("writes for each of {OBJECTS} {}", kind.plural),
            "requests",
            &writes,
            &[Aim::AtMost(most)],
        ));
        figures.push(Figure::new("P7", &format!("reads for each of {OBJECTS} {}", kind.plural), "requests", &reads, &[Aim::AtMost(0.0)]));
    }
    let name = format!("requests in {} quiet seconds, but for the Lease", QUIET.as_secs());
    figures.push(Figure::new("P7", &name, "requests", &quiet, &[Aim::AtMost(0.0)]));
    Ok(figures)
}

/// Waits until nothing has been asked for three seconds but by what renews a Lease.
async fn settled_down(proxy: &Proxy) {
    loop {
        let mark = proxy.mark();
        tokio::time::sleep(Duration::from_secs(3)).await;
        if proxy.since(mark).iter().all(|entry| entry.seen.path.contains("/leases/")) {
            return;
        }
    }
}
