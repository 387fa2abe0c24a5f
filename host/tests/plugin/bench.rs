//! What the tests stand on: a runtime, the probe's bytes in every variant, requests, a log to read.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, OnceLock},
    time::Duration,
};

use berth_host::{
    fence::{self, BootTime, Fence, Gate},
    object::{GroupKind, Key, Object, ObjectKey},
    package::{Config, Digest, Package, Refusal},
    plugin::{Prepared, Runtime, RuntimeConfig},
    reads::{Page, Query, ReadError, Reader, Target},
    reconcile::{Failure, Outcome, Phase, Reconcile, Request},
};
use futures::{FutureExt, future::BoxFuture};
use serde_json::{Value, json};
use tracing::{Dispatch, subscriber::NoSubscriber};
use tracing_subscriber::fmt::MakeWriter;
use wasm_encoder::Encode;

/// The binary that compiles.
pub const BERTH: &str = env!("CARGO_BIN_EXE_berth");

/// The probe as it was built.
pub fn probe() -> &'static [u8] {
    static PROBE: OnceLock<Vec<u8>> = OnceLock::new();
    PROBE.get_or_init(|| {
        let target = Path::new(BERTH).ancestors().nth(2).expect("target/PROFILE/berth");
        let path = target.join("wasm32-wasip2/guest/probe.wasm");
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}; run make guests", path.display()))
    })
}

/// The probe with another claim; see the probe's own `claim.rs`.
pub fn claiming(claim: &Value) -> Vec<u8> {
    const MARKER: &[u8] = b"PROBE-CLAIM:{}";
    let mut bytes = probe().to_vec();
    let at = bytes.windows(MARKER.len()).position(|window| window == MARKER).expect("the probe has its slot");
    let text = claim.to_string();
    let start = at + MARKER.len() - 2;
    bytes[start..start + text.len()].copy_from_slice(text.as_bytes());
    bytes
}

/// The same behaviour under another digest: a custom section at the end.
pub fn relabelled(component: &[u8], name: &str) -> Vec<u8> {
    [component, &section(0, &encoded(name))].concat()
}

/// A section of a component or of a core module.
pub fn section(id: u8, content: &[u8]) -> Vec<u8> {
    [vec![id], encoded(content)].concat()
}

/// A number in as many bytes as it takes; bytes with their number before them.
pub fn encoded(it: &(impl Encode + ?Sized)) -> Vec<u8> {
    let mut bytes = Vec::new();
    it.encode(&mut bytes);
    bytes
}

/// Bytes with every `from` replaced by `to`, of the same length so that no size in the component changes.
pub fn replaced(component: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = component.to_vec();
    let places: Vec<_> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty(), "{from} is not in the component");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

/// A package with this component and `plugin.yaml`.
pub fn package(component: impl Into<Vec<u8>>, yaml: &str) -> Package {
    let component: bytes::Bytes = component.into().into();
    let digest = Digest::of(&component);
    let config = Config::parse(yaml.as_bytes()).expect("valid plugin.yaml");
    Package { name: "probe".into(), component, digest, config, config_hash: String::new() }
}

/// A cache that lives from one run of the tests to the next.
pub fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin-cache")
}

/// A runtime, a plugin in it, and leadership.
pub struct Bench {
    pub handler: Arc<dyn Reconcile>,
    pub gate: Gate,
    pub fence: Fence,
    pub cluster: Arc<Cluster>,
}

/// What runs read: every object has the data that stands here, and each request is written down.
#[derive(Debug, Default)]
pub struct Cluster {
    pub targets: Mutex<Vec<Target>>,
    pub queries: Mutex<Vec<Query>>,
}

impl Reader for Cluster {
    fn get(&self, target: Target) -> BoxFuture<'_, Result<Option<Arc<Object>>, ReadError>> {
        let answer = match &*target.key.name {
            "absent" => Ok(None),
            "denied" => Err(ReadError::Forbidden("not for you".into())),
            "late" => Err(ReadError::NotSynced),
            "unasked" => Err(ReadError::Unavailable("connection refused".into())),
            "odd" => Err(ReadError::Other("out of order".into())),
            name => Ok(Some(object(name))),
        };
        let hangs = &*target.key.name == "hangs";
        self.targets.lock().expect("no panic while the lock is held").push(target);
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            // An answer may take its time, as the API server may have to be asked.
            tokio::time::sleep(Duration::from_millis(5)).await;
            answer
        }
        .boxed()
    }

    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, ReadError>> {
        let page = match query.after.as_deref() {
            None => Page { items: vec![object("a"), object("b")], next: Some("t1/b".into()) },
            Some(_) => Page { items: vec![object("c")], next: None },
        };
        self.queries.lock().expect("no panic while the lock is held").push(query);
        async move { Ok(page) }.boxed()
    }
}

fn object(name: &str) -> Arc<Object> {
    let text = format!(r#"{{"metadata":{{"namespace":"t1","name":"{name}"}},"data":{{"big":9007199254740993,"é":1.0}}}}"#);
    Arc::new(Object::parse(&text).expect("an object"))
}

impl Bench {
    /// The probe as it is.
    pub async fn new(yaml: &str) -> Self {
        Self::with(probe(), yaml, |_| {}).await
    }

    /// A variant of it, in a runtime that is set up otherwise.
    pub async fn with(component: &[u8], yaml: &str, set: impl FnOnce(&mut RuntimeConfig)) -> Self {
        let mut config = RuntimeConfig::new(BERTH, cache());
        config.limits.sandboxes = 80;
        set(&mut config);
        let runtime = Runtime::new(config).expect("a runtime");
        let package = package(component, yaml);
        let handler = runtime.prepare(&package).await.and_then(|prepared| prepared.handler(&package)).expect("the probe is accepted");
        let (gate, leadership) = fence::gate();
        gate.open(BootTime::now() + Duration::from_secs(3600));
        let fence = leadership.current().expect("open");
        Self { handler, gate, fence, cluster: Arc::default() }
    }

    /// Runs an object with this spec.
    pub async fn run(&self, spec: Value) -> Result<Outcome, Failure> {
        self.handler.reconcile(self.request(&spec.to_string())).await
    }

    /// A request for an object with the text of a spec.
    pub fn request(&self, spec: &str) -> Request {
        let json = format!(
            r#"{{"apiVersion":"probe.acme.io/v1","kind":"Probe","metadata":{{"name":"p1","namespace":"t1","uid":"u1","generation":1,"resourceVersion":"1"}},"spec":{spec}}}"#
        );
        Request {
            key: Key { kind: GroupKind { group: "probe.acme.io".into(), kind: "Probe".into() }, object: ObjectKey::new(Some("t1"), "p1") },
            object: Arc::new(Object::parse(&json).expect("an object")),
            phase: Phase::Apply,
            attempt: 0,
            last_failure: None,
            idempotency_key: "probes.probe.acme.io/t1/p1/u1".into(),
            fence: self.fence.clone(),
            reader: self.cluster.clone(),
        }
    }

    /// The status of a run that has to succeed.
    pub async fn status(&self, spec: Value) -> Value {
        let outcome = self.run(spec.clone()).await.unwrap_or_else(|failure| panic!("{spec}: {failure}"));
        outcome.status.unwrap_or(Value::Null)
    }

    /// The failure of a run that has to fail.
    pub async fn failure(&self, spec: Value) -> Failure {
        match self.run(spec.clone()).await {
            Ok(outcome) => panic!("{spec} succeeded: {outcome:?}"),
            Err(failure) => failure,
        }
    }

    /// That a run still succeeds.
    pub async fn still_works(&self) {
        assert_eq!(self.status(json!({ "do": "ok" })).await["phase"], "Done");
    }
}

/// Prepares a component in a runtime of its own.
pub async fn prepare(component: &[u8]) -> Result<Prepared, Refusal> {
    Runtime::new(RuntimeConfig::new(BERTH, cache())).expect("a runtime").prepare(&package(component, "")).await
}

/// Prepares the probe in a runtime that is set up otherwise.
pub async fn prepare_in(set: impl FnOnce(&mut RuntimeConfig)) -> Prepared {
    let mut config = RuntimeConfig::new(BERTH, cache());
    set(&mut config);
    Runtime::new(config).expect("a runtime").prepare(&package(probe(), "")).await.expect("the probe is accepted")
}

/// Why a component is refused.
pub async fn refusal(component: &[u8]) -> Refusal {
    prepare(component).await.err().expect("refused")
}

/// The events of this thread while it lives, as JSON.
pub struct Events {
    written: Written,
    _guard: tracing::subscriber::DefaultGuard,
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic while writing").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Written {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Events {
    /// From now on.
    pub fn record() -> Self {
        // With one subscriber alone, tracing asks the thread that comes to a line first, and where that belongs to another test, which
        // has none, the line is off for all.
        static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::default()));
        LazyLock::force(&ANOTHER);
        let written = Written::default();
        let subscriber = tracing_subscriber::fmt().json().with_max_level(tracing::Level::TRACE).with_writer(written.clone()).finish();
        Self { written, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Those of the target `guest`: its text and the host's about it.
    pub fn of_guests(&self) -> Vec<Value> {
        self.all().into_iter().filter(|event| event["target"] == "guest").collect()
    }

    /// The messages of all.
    pub fn messages(&self) -> Vec<String> {
        self.all().iter().filter_map(|event| event["fields"]["message"].as_str().map(str::to_owned)).collect()
    }

    fn all(&self) -> Vec<Value> {
        let text = String::from_utf8(self.written.0.lock().expect("no panic while writing").clone()).expect("UTF-8");
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("one event is one line: {error}: {line}")))
            .collect()
    }
}
