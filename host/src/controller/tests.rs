//! Tests of the loop as a whole, on an API server in memory.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::atomic::{AtomicU32, Ordering},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract,
    http::{Method, Uri},
    response::{IntoResponse, Response},
};
use futures::stream;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::Instant};

use super::*;
use crate::{
    account::Accounts,
    authority,
    catalog::{Table, tests::serving},
    events,
    fence::{self, BootTime},
    reconcile::{Failure, Next, Outcome, Reconcile, Request},
};

/// An API server with objects of `K` in the namespace `n`, which tells of every write.
struct Server {
    objects: Mutex<BTreeMap<String, Value>>,
    events: mpsc::UnboundedSender<String>,
    watched: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    writes: mpsc::UnboundedSender<String>,
}

impl Server {
    /// One with these objects, and its writes: `NAME status` or `NAME metadata`.
    fn with(names: &[&str]) -> (Arc<Self>, mpsc::UnboundedReceiver<String>) {
        let ((events, watched), (writes, written)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let objects = names.iter().map(|name| ((*name).to_owned(), object(name))).collect();
        (Arc::new(Self { objects: Mutex::new(objects), events, watched: watched.into(), writes }), written)
    }

    /// A client of it, as if over a network.
    fn client(self: &Arc<Self>) -> Client {
        Client::new(Router::new().fallback(answer).with_state(self.clone()), "default")
    }

    fn create(&self, name: &str) {
        self.objects.lock().expect("no panic under the lock").insert(name.to_owned(), object(name));
        // The type comes first, as from a real one.
        self.events.send(format!("{{\"type\":\"ADDED\",\"object\":{}}}\n", object(name))).expect("the server is there");
    }

    fn object(&self, name: &str) -> Value {
        self.objects.lock().expect("no panic under the lock")[name].clone()
    }

    /// `/apis/g.io/v1/namespaces/n/ks/NAME`, or that of its status.
    fn patch(&self, path: &str, patch: &Value) -> Value {
        let mut parts = path.split('/').skip(7);
        let name = parts.next().expect("a name");
        let what = if parts.next() == Some("status") { "status" } else { "metadata" };
        let mut objects = self.objects.lock().expect("no panic under the lock");
        let object = objects.get_mut(name).expect("it is there");
        match what {
            "status" => object["status"] = patch["status"].clone(),
            _ => object["metadata"]["labels"] = patch["metadata"]["labels"].clone(),
        }
        let version: u32 = object["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok()).expect("a number");
        object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
        self.writes.send(format!("{name} {what}")).expect("the test is there");
        object.clone()
    }

    fn watch(self: Arc<Self>) -> Response {
        let events = stream::unfold(self, |server| async move {
            let line = server.watched.lock().await.recv().await?;
            Some((Ok::<_, Infallible>(line), server))
        });
        Body::from_stream(events).into_response()
    }
}

async fn answer(extract::State(server): extract::State<Arc<Server>>, method: Method, uri: Uri, body: Bytes) -> Response {
    if method == Method::PATCH {
        return server.patch(uri.path(), &serde_json::from_slice(&body).expect("JSON")).to_string().into_response();
    }
    if uri.query().is_some_and(|query| query.contains("watch=true")) {
        return server.watch();
    }
    let items: Vec<Value> = server.objects.lock().expect("no panic under the lock").values().cloned().collect();
    json!({"metadata": {"resourceVersion": "1"}, "items": items}).to_string().into_response()
}

fn object(name: &str) -> Value {
    let metadata = json!({"name": name, "namespace": "n", "uid": name, "generation": 1, "resourceVersion": "1"});
    json!({"apiVersion": "g.io/v1", "kind": "K", "metadata": metadata, "spec": {}})
}

/// A controller for `K` with this handler.
fn controller(client: &Client, leadership: Leadership, metrics: Arc<Metrics>, handler: impl Reconcile + 'static) -> Arc<Controller> {
    let (catalog, _judgements) = Catalog::new();
    let plain = Arc::into_inner(serving(b"1", "a")).expect("nobody else has it");
    let serving = Arc::new(Serving { handler: Arc::new(handler), ..plain });
    let kind = serving.claim.reconciles.group_kind();
    catalog.replace(Table::from([(kind, Arc::new(Versions::only(serving)))]));
    let accounts = Accounts::new("sys");
    let authority = Authority::new(accounts.clone(), authority::review(client.clone(), "sys"));
    let (minute, deadline) = (Duration::from_secs(60), Duration::from_secs(10));
    let children = crate::children::Settings { namespaces: Vec::new(), watch_timeout: minute, deadline };
    let children = Children::new(client.clone(), accounts, children);
    let (recorder, _sending) = events::recorder(client.clone(), "host".into());
    let means = Means { client: client.clone(), catalog, leadership, metrics, recorder, authority, children };
    let scope = Scope { namespaces: Vec::new(), watch_timeout: minute };
    Controller::new(means, Settings { scope, resync: 10 * minute, write_deadline: deadline, grace: deadline })
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_turn_is_counted_and_backed_off_and_leaves_the_loop_and_its_object_whole() {
    const PANICS: u32 = 2;
    let (server, mut writes) = Server::with(&["odd", "plain"]);
    let runs = AtomicU32::new(0);
    let handler = move |request: Request| {
        let name = request.key.object.name.to_string();
        let panics = name == "odd" && runs.fetch_add(1, Ordering::Relaxed) < PANICS;
        async move {
            assert!(!panics, "as a bug would");
            let labels = vec![("team".to_owned(), Some("a".to_owned()))];
            Ok::<_, Failure>(Outcome { status: Some(json!({ "of": name })), labels, ..Outcome::just(Next::AwaitChange) })
        }
        .boxed()
    };
    let (gate, leadership) = fence::gate();
    gate.open(BootTime::now() + Duration::from_secs(3600));
    let (metrics, shutdown, began) = (Arc::<Metrics>::default(), CancellationToken::new(), Instant::now());
    let controller = controller(&server.client(), leadership, metrics.clone(), handler);
    let stop = shutdown.clone();
    let running = tokio::spawn(async move { controller.run(stop).await });

    let mut next = async || {
        let write = tokio::time::timeout(Duration::from_secs(60), writes.recv()).await;
        write.expect("within a minute").expect("the server is there")
    };
    assert_eq!([next().await, next().await], ["plain status", "plain metadata"]);
    server.create("late");
    assert_eq!([next().await, next().await], ["late status", "late metadata"], "the loop goes on");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // 1 s and 2 s with their jitter, and before that nothing of it is written.
    assert_eq!([next().await, next().await], ["odd status", "odd metadata"]);
    let waited = began.elapsed().as_secs_f64();
    assert!((3.0..3.4).contains(&waited), "{waited} s");
    shutdown.cancel();
    running.await.expect("the loop has ended in order");
    assert!(writes.try_recv().is_err(), "each is written once");
    let odd = server.object("odd");
    assert_eq!((&odd["status"], &odd["metadata"]["labels"]), (&json!({"of": "odd", "observedGeneration": 1}), &json!({"team": "a"})));
    let text = metrics.render();
    for (result, count) in [("host_error", PANICS), ("success", 3)] {
        assert!(text.contains(&format!(r#"berth_reconcile_total{{kind="K.g.io",result="{result}"}} {count}"#)), "{text}");
    }
}
