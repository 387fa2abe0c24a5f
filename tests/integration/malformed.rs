//! Objects that no schema has checked: every field wrong in every way that we know, beside a healthy neighbour.

use berth_tests::{
    cluster::Cluster,
    eventually::{eventually, scaled},
    host::Host,
    resource::Resource,
    stage::{SOON, Stage},
};
use futures::StreamExt;
use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Map, Value, json};

/// Requests of the test at once.
const AT_ONCE: usize = 20;
/// What a message in a status may be long at most.
const MESSAGE_MAX: usize = 1024;

/// Something odd for any field.
fn oddities() -> Vec<Value> {
    let mut odd = vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(7.5),
        json!(1e300),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(9_007_199_254_740_993_i64),
        json!([]),
        json!([1]),
        json!({}),
        json!({"a": {"b": [null]}}),
    ];
    let texts =
        ["", " ", "x", "high", "zip", "2999-13-99T99:99:99Z", "0001-01-01T00:00:00Z", "null", "\u{0}\n\r\t", "\u{202e}\u{feff}\u{1f600}é"];
    odd.extend(texts.map(Value::from));
    odd.push("é".repeat(5_000).into());
    odd.push((0..90).fold(json!("deep"), |inner, _| json!([inner])));
    odd
}

/// The fields that a schema names, and one that it does not.
fn fields(schema: &Value) -> Vec<String> {
    let named = schema["properties"]["spec"]["properties"].as_object().into_iter().flatten();
    named.map(|(name, _)| name.clone()).chain(["x-unknown".into()]).collect()
}

fn with(good: &Value, field: &str, value: Option<Value>) -> Value {
    let mut spec = good.as_object().cloned().unwrap_or_default();
    match value {
        Some(value) => drop(spec.insert(field.to_owned(), value)),
        None => drop(spec.remove(field)),
    }
    spec.into()
}

/// Objects made of a good spec: each field absent and odd in every way, the whole spec odd, pairs of odd fields, and statuses that
/// nobody would have written. `None` has no spec at all.
fn specs(schema: &Value, good: &Value, count: usize) -> Vec<Option<Value>> {
    let (fields, odd) = (fields(schema), oddities());
    let mut specs: Vec<Option<Value>> = vec![None];
    specs.extend(odd.iter().cloned().map(Some));
    for field in &fields {
        specs.push(Some(with(good, field, None)));
        specs.extend(odd.iter().map(|value| Some(with(good, field, Some(value.clone())))));
    }
    specs.push(Some(with(good, &fields[0], Some("m".repeat(1 << 20).into()))));
    let mut number = 0;
    while specs.len() < count {
        number += 1;
        let pick = |step: usize, of: usize| (number * step + number / of) % of;
        let (one, two) = (&fields[pick(1, fields.len())], &fields[pick(3, fields.len())]);
        let spec = with(good, one, Some(odd[pick(5, odd.len())].clone()));
        specs.push(Some(with(&spec, two, Some(odd[pick(7, odd.len())].clone()))));
    }
    specs
}

/// A status that was there before, for every few objects.
fn status(number: usize) -> Option<Value> {
    let odd = oddities();
    match number % 5 {
        0 => Some(odd[number / 5 % odd.len()].clone()),
        1 => Some(
            json!({"phase": odd[number / 5 % odd.len()], "retries": odd[number / 3 % odd.len()], "observedGeneration": odd[number / 7 % odd.len()]}),
        ),
        _ => None,
    }
}

/// Takes the schema of a kind away, as somebody may who does not know better. Returns what it was.
async fn open_up(cluster: &Cluster, resource: Resource) -> Value {
    let crds = Resource::CRD.api(cluster.client(), None);
    let name = format!("{}.{}", resource.plural, resource.group);
    let definition = crds.get(&name).await.expect("installed");
    let mut versions = definition.data["spec"]["versions"].clone();
    let schema = versions[0]["schema"]["openAPIV3Schema"].take();
    versions[0]["schema"] = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let patch = Patch::Merge(json!({"spec": {"versions": versions}}));
    crds.patch(&name, &PatchParams::default(), &patch).await.expect("patched");
    let api = cluster.api(resource);
    let probe = DynamicObject::new("probe", &resource.api_resource()).data(json!({"spec": 7}));
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually(SOON, async || api.create(&dry_run, &probe).await.map(drop)).await;
    schema
}

async fn create(api: &Api<DynamicObject>, resource: Resource, number: usize, spec: Option<Value>) {
    let mut data = Map::new();
    data.extend(spec.map(|spec| ("spec".to_owned(), spec)));
    let mut object = DynamicObject::new(&format!("odd-{number}"), &resource.api_resource()).data(data.into());
    if number % 10 == 3 {
        object.metadata.annotations = Some([("someone.io/notes".to_owned(), "n".repeat(200 << 10))].into());
    }
    api.create(&PostParams::default(), &object).await.unwrap_or_else(|error| panic!("odd-{number}: {error}"));
    if let Some(status) = status(number) {
        // What the API server itself does not take is none of ours.
        api.patch_status(&format!("odd-{number}"), &PatchParams::default(), &Patch::Merge(json!({"status": status}))).await.ok();
    }
}

/// What a mail says for as long as there is more in its status, by somebody else's hand, than any outcome may have.
const TOO_DEEP: &str = "nested deeper than the 64 levels";

/// Whether an object is finished, or waits for a time that is to come, or for somebody to mend its status.
fn at_rest(object: &DynamicObject) -> bool {
    let (spec, status) = (&object.data["spec"], &object.data["status"]);
    let finished = ["Sent", "Done", "Failed"].iter().any(|phase| status["phase"] == *phase);
    let observed = status["observedGeneration"].as_i64() == object.metadata.generation;
    let too_deep = status["message"].as_str().is_some_and(|message| message.contains(TOO_DEEP));
    (finished && observed) || too_deep || spec["notBefore"].as_str().is_some_and(|time| time.starts_with("2999"))
}

async fn until_at_rest(host: &Host, api: &Api<DynamicObject>, count: usize) -> Vec<DynamicObject> {
    eventually(scaled(SOON * 3, SOON * 10), async || {
        let objects = api.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
        match objects.iter().find(|object| !at_rest(object)) {
            None if objects.len() >= count => Ok(objects),
            restless => Err(format!("{} of {count} are there, and {restless:?} is not at rest; {}", objects.len(), host.id())),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_no_schema_has_checked_are_failed_with_a_reason_beside_healthy_ones() {
    let stage = Stage::on(Cluster::alone().await).await;
    let mails = stage.push_email_request().await;
    let mut host = stage.report_host("backoff: {base: 100ms, max: 200ms}\n").await;
    stage.cluster.until_serving("email-request", &mails).await;
    let good = [
        (Resource::EMAIL, json!({"to": "a@example.com", "template": "welcome", "locale": "en-GB"})),
        (Resource::JOB, json!({"report": "sales", "format": "pdf", "priority": 0, "notBefore": "2026-01-02T03:04:05Z"})),
    ];
    for (resource, good) in &good {
        let schema = open_up(&stage.cluster, *resource).await;
        let specs = specs(&schema, good, scaled(150, 2500));
        let (api, count) = (stage.cluster.api(*resource), specs.len());
        let healthy = format!("healthy-{}", resource.plural);
        let some = futures::stream::iter(specs.into_iter().enumerate());
        some.for_each_concurrent(AT_ONCE, async |(number, spec)| create(&api, *resource, number, spec).await).await;
        stage.cluster.create(*resource, &healthy, good.clone()).await;
        // It waits for its turn behind those that came before.
        let is_done = |object: &Value| ["Sent", "Done"].iter().any(|phase| object["status"]["phase"] == *phase);
        stage.cluster.until(*resource, &healthy, scaled(SOON, SOON * 10), is_done).await;
        let objects = until_at_rest(&host, &api, count + 1).await;
        let failed = objects.iter().filter(|object| object.data["status"]["phase"] == "Failed").count();
        println!("{}: {count} odd objects, of which {failed} have failed", resource.kind);
        assert!(failed > count / 3, "{failed} of {count} have failed, although most are nothing that a handler could work with");
        for object in objects {
            let (name, status) = (object.metadata.name.unwrap_or_default(), &object.data["status"]);
            let message = status["message"].as_str().unwrap_or_default();
            assert!(message.len() <= MESSAGE_MAX, "{name}: {} bytes", message.len());
            assert!(status["phase"] != "Failed" || !message.is_empty(), "{name} failed without a reason");
        }
    }
    assert!(host.runs());
    let log = host.log();
    let faults: Vec<&str> = log.lines().filter(|line| line.contains("panicked") || line.contains("ERROR")).collect();
    assert!(faults.is_empty(), "{faults:#?}");
    // The laws of both back ends: one mail and one report for each key, whatever it was about.
    for key in stage.gateway.deliveries().iter().map(|delivery| &delivery.key) {
        assert_eq!(stage.gateway.deliveries_for(key).len(), 1, "{key}");
    }
    host.until_queued("EmailRequest.notify.acme.io", "ready", 0.0).await;
    assert_eq!(host.terminate().await, Some(0));
}
