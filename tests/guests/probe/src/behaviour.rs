//! What the probe does, by the word in `spec.do`.

use std::{hint::black_box, time::Duration};

use serde_json::{Value, json, value::RawValue};

use crate::{
    berth::plugin::{
        cluster, log,
        types::{Event, EventType, Kind, Next, ObjectRef, Outcome, Phase, Request},
    },
    hoard::hoard,
    http,
};

pub fn reconcile(request: &Request) -> Outcome {
    let object: Value = serde_json::from_str(&request.object).expect("the host gives JSON");
    let settings: Value = serde_json::from_str(&request.settings).expect("the host gives JSON");
    let spec = &object["spec"];
    let what = spec["do"].as_str().or_else(|| settings["do"].as_str()).unwrap_or("ok");
    let number = |name: &str, default: u64| spec[name].as_u64().unwrap_or(default);
    // What it does at the deletion is a word of its own.
    let what = if request.phase == Phase::Finalize { spec["finalize"].as_str().unwrap_or("ok") } else { what };
    match what {
        "ok" => done(json!({ "phase": "Done", "key": request.idempotency_key, "settings": settings, "attempt": request.attempt })),
        "given" => given(&object, &request.object),
        "trap" => std::process::abort(),
        "panic" => panic!("the probe was told to panic\nover two lines"),
        "exit" => std::process::exit(3),
        "loop" => spin(),
        "bomb" => bomb(),
        "deep" => done(json!({ "depth": deep(1, false) })),
        "wide" => done(json!({ "depth": wide(1) })),
        "deephost" => done(json!({ "depth": deep(1, true) })),
        "logflood" => log_flood(number("bytes", 64 << 20)),
        "loginject" => log_inject(),
        "stdout" => stdout(),
        "http" => get(spec, 1),
        "httpflood" => get(spec, number("times", 21)),
        "sleep" => sleep(Duration::from_millis(number("ms", 1))),
        "hostblock" => sleep(Duration::from_secs(3600)),
        "hostflood" => host_flood(),
        "greedy" => greedy(number("handles", 100_001)),
        "hoard" => done(json!({ "phase": "Done", "kept": hoard(spec["what"].as_str().unwrap_or("bodies"), number("count", 300)) })),
        "random" => done(json!({ "bytes": wasip2::random::random::get_random_bytes(number("bytes", 1)).len() })),
        "logline" => log_line(number("bytes", 1) as usize, number("fields", 0)),
        "half" => half(spec),
        "bigstatus" => done(json!({ "phase": "Done", "message": "x".repeat(number("bytes", 3 << 20) as usize) })),
        "deepjson" => raw(nested(number("depth", 65) as usize)),
        "rawstatus" => raw(spec["text"].as_str().unwrap_or_default().to_owned()),
        "requeue0" => just(Next::AfterMs(0)),
        "requeuemax" => just(Next::AfterMs(u64::MAX)),
        "roundtrip" => raw(spec_text(&request.object)),
        "labels" => labels(spec),
        "badlabel" => Outcome { labels: vec![("elsewhere.io/phase".into(), Some("x".into()))], ..done(json!({ "phase": "Done" })) },
        "children" => children(spec, &settings),
        "flakyevents" => {
            Outcome { events: vec![event(request.attempt.into())], ..just(Next::Retry(format!("attempt {}", request.attempt))) }
        }
        "events" => Outcome { events: (0..number("events", 12)).map(event).collect(), ..just(Next::AwaitChange) },
        "giveup" => just(Next::GiveUp(spec["cause"].as_str().unwrap_or("it cannot heal").into())),
        "retry" => just(Next::Retry(spec["cause"].as_str().unwrap_or("not yet").into())),
        "retryafter" => just(Next::RetryAfterMs((number("ms", 7000), "asked to wait".into()))),
        "flaky" if u64::from(request.attempt) < number("fails", 1) => just(Next::Retry(format!("attempt {}", request.attempt))),
        "flaky" => done(json!({ "phase": "Done", "attempt": request.attempt, "lastFailure": request.last_failure })),
        "get" => read_one(spec),
        "pass" => pass(spec),
        "list" => read_all(spec),
        "reach" => reach(),
        "sockets" => sockets(number("times", 1)),
        other => just(Next::GiveUp(format!("the probe does not know {other:?}"))),
    }
}

fn just(next: Next) -> Outcome {
    Outcome { status: None, labels: Vec::new(), children: None, events: Vec::new(), next, extensions: Vec::new() }
}

fn raw(status: String) -> Outcome {
    Outcome { status: Some(status), ..just(Next::AwaitChange) }
}

fn done(status: Value) -> Outcome {
    raw(status.to_string())
}

pub fn spin() -> ! {
    let mut turns = 0_u64;
    loop {
        turns = black_box(turns.wrapping_add(1));
    }
}

fn bomb() -> Outcome {
    let mut hoard = Vec::new();
    loop {
        hoard.push(black_box(vec![1_u8; 1 << 20]));
    }
}

/// With small frames, so that the stack of the machine ends before the one in linear memory does.
#[allow(unconditional_recursion, reason = "it is the point")]
fn deep(level: u64, host: bool) -> u64 {
    if host && level % 64 == 0 {
        log::emit(log::Level::Trace, "deeper", &[]);
    }
    deep(black_box(level) + 1, host) ^ level
}

/// With frames so large that the stack in linear memory ends first.
#[allow(unconditional_recursion, reason = "it is the point")]
fn wide(level: u64) -> u64 {
    let frame = black_box([level; 512]);
    wide(level + 1) ^ black_box(frame)[7]
}

fn log_flood(bytes: u64) -> Outcome {
    let line = "flood ".repeat(170);
    for _ in 0..bytes / line.len() as u64 {
        log::emit(log::Level::Info, &line, &[]);
    }
    just(Next::AwaitChange)
}

/// One line with a message of so many bytes, and so many fields.
fn log_line(bytes: usize, fields: u64) -> Outcome {
    let fields: Vec<_> = (0..fields).map(|number| (format!("field-{number}"), "\u{1b}".repeat(50))).collect();
    log::emit(log::Level::Info, &"\u{7}".repeat(bytes), &fields);
    just(Next::AwaitChange)
}

fn log_inject() -> Outcome {
    let message = "first\nlevel=ERROR second \u{1b}[31mred\u{7} \u{202e}txet";
    log::emit(log::Level::Warn, message, &[("a key".into(), "a\r\nvalue".into())]);
    just(Next::AwaitChange)
}

fn stdout() -> Outcome {
    println!("to stdout");
    eprint!("to stderr, unfinished");
    just(Next::AwaitChange)
}

fn sleep(time: Duration) -> Outcome {
    std::thread::sleep(time);
    just(Next::AwaitChange)
}

fn host_flood() -> Outcome {
    let large = "x".repeat(8 << 20);
    for _ in 0..100 {
        log::emit(log::Level::Info, &large, &[]);
    }
    just(Next::AwaitChange)
}

fn greedy(handles: u64) -> Outcome {
    let hoard: Vec<_> = (0..handles).map(|_| wasip2::clocks::monotonic_clock::subscribe_duration(1)).collect();
    done(json!({ "handles": hoard.len() }))
}

/// What it was given: what identifies the object, and which fields of the metadata there were.
fn given(object: &Value, text: &str) -> Outcome {
    let metadata = object["metadata"].as_object();
    let fields: Vec<_> = metadata.into_iter().flatten().map(|(field, _)| field).collect();
    done(json!({ "phase": "Done", "apiVersion": object["apiVersion"], "kind": object["kind"], "metadata": fields, "length": text.len() }))
}

fn nested(depth: usize) -> String {
    format!("{}{}", "{\"a\":".repeat(depth - 1) + "{", "}".repeat(depth))
}

fn spec_text(object: &str) -> String {
    let fields: std::collections::BTreeMap<&str, &RawValue> = serde_json::from_str(object).expect("the host gives an object");
    fields["spec"].get().to_owned()
}

fn labels(spec: &Value) -> Outcome {
    let wanted = spec["labels"].as_object().into_iter().flatten();
    let labels = wanted.map(|(key, value)| (key.clone(), value.as_str().map(str::to_owned))).collect();
    Outcome { labels, ..just(Next::AwaitChange) }
}

/// The objects in `spec.children`, or else in the settings; without either the children are left as they are. The phase is `spec.phase`.
fn children(spec: &Value, settings: &Value) -> Outcome {
    let children = spec["children"]
        .as_array()
        .or_else(|| settings["children"].as_array())
        .map(|children| children.iter().map(Value::to_string).collect());
    let phase = spec["phase"].as_str().unwrap_or("Done");
    Outcome { children, ..done(json!({ "phase": phase })) }
}

fn event(number: u64) -> Event {
    Event { kind: EventType::Normal, reason: "Counted".into(), action: "Count".into(), note: format!("event {number}") }
}

fn get(spec: &Value, times: u64) -> Outcome {
    let url = spec["url"].as_str().unwrap_or_default();
    let mut last = None;
    for _ in 0..times {
        match http::send(url, spec["method"].as_str(), spec["headers"].as_object(), spec["body"].as_str()) {
            Ok(answer) => last = Some(answer),
            Err(error) => return Outcome { status: Some(json!({ "error": error }).to_string()), ..just(Next::Retry(error)) },
        }
    }
    let (code, body) = last.unwrap_or_default();
    done(json!({ "phase": "Done", "code": code, "body": String::from_utf8_lossy(&body[..body.len().min(64 << 10)]), "length": body.len() }))
}

/// Ends, in the way of `spec.end`, in the middle of a request.
fn half(spec: &Value) -> Outcome {
    http::begin(spec["url"].as_str().unwrap_or_default());
    std::thread::sleep(Duration::from_millis(spec["ms"].as_u64().unwrap_or_default()));
    match spec["end"].as_str() {
        Some("trap") => std::process::abort(),
        Some("hang") => sleep(Duration::from_secs(3600)),
        _ => just(Next::AwaitChange),
    }
}

/// One object of the kind in `of`: its data, or else its status. It takes its time after reading, if it is told to.
fn read_one(spec: &Value) -> Outcome {
    match find(spec, spec["name"].as_str().unwrap_or("x")) {
        Ok(object) => {
            std::thread::sleep(Duration::from_millis(spec["ms"].as_u64().unwrap_or_default()));
            let part = |name: &str| object.as_ref().map(|object| object[name].clone()).filter(|part| !part.is_null());
            done(json!({ "phase": "Done", "found": object.is_some(), "data": part("data").or_else(|| part("status")) }))
        }
        Err(error) => unread(spec, error),
    }
}

/// The larger of `spec.nonce` and the nonce in the status of the object that it reads, if it reads one.
fn pass(spec: &Value) -> Outcome {
    let nonce = |of: &Value| of["nonce"].as_u64().unwrap_or_default();
    match spec["name"].as_str().map(|name| find(spec, name)).transpose() {
        Ok(before) => done(json!({ "nonce": before.flatten().map_or(0, |object| nonce(&object["status"])).max(nonce(spec)) })),
        Err(error) => unread(spec, error),
    }
}

/// The object of this name and of the kind in `of`.
fn find(spec: &Value, name: &str) -> Result<Option<Value>, cluster::ReadError> {
    let Kind { group, version, kind, .. } = crate::claim::kind(&spec["of"]);
    let found = cluster::get(&ObjectRef { group, version, kind, namespace: namespace(spec), name: name.to_owned() })?;
    Ok(found.map(|text| serde_json::from_str(&text).expect("the host gives JSON")))
}

/// All objects of the kind in `of`, page by page.
fn read_all(spec: &Value) -> Outcome {
    let kind = crate::claim::kind(&spec["of"]);
    let selector = spec["selector"].as_str().unwrap_or_default();
    let limit = spec["limit"].as_u64().unwrap_or_default() as u32;
    let (mut names, mut pages, mut next) = (Vec::new(), 0, None);
    loop {
        match cluster::list(&kind, namespace(spec).as_deref(), selector, limit, next.as_deref()) {
            Ok(page) => {
                let objects = page.items.iter().map(|text| serde_json::from_str::<Value>(text).expect("the host gives JSON"));
                names.extend(objects.map(|object| object["metadata"]["name"].clone()));
                (pages, next) = (pages + 1, page.continue_);
            }
            Err(error) => return unread(spec, error),
        }
        if next.is_none() {
            return done(json!({ "phase": "Done", "names": names, "pages": pages }));
        }
    }
}

fn namespace(spec: &Value) -> Option<String> {
    spec["namespace"].as_str().map(str::to_owned)
}

fn unread(spec: &Value, error: cluster::ReadError) -> Outcome {
    let (word, sentence) = match error {
        cluster::ReadError::Forbidden(sentence) => ("forbidden", sentence),
        cluster::ReadError::NotSynced => ("not-synced", "not synced".to_owned()),
        cluster::ReadError::Other(sentence) => ("other", sentence),
    };
    let status = json!({ "unread": word, "error": sentence });
    let next = if spec["cope"] == true { Next::AwaitChange } else { Next::Retry(sentence) };
    Outcome { status: Some(status.to_string()), ..just(next) }
}

fn secret() -> ObjectRef {
    ObjectRef { group: String::new(), version: "v1".into(), kind: "Secret".into(), namespace: None, name: "denied".into() }
}

/// The same denial over and over.
fn sockets(times: u64) -> Outcome {
    let denied = (0..times).filter(|_| std::net::TcpStream::connect("127.0.0.1:1").is_err()).count();
    done(json!({ "phase": "Done", "denied": denied }))
}

/// Everything that a sandbox has to deny, tried.
fn reach() -> Outcome {
    let text = |result: Result<(), std::io::Error>| result.err().map(|error| error.to_string());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map(|since| since.as_secs()).unwrap_or_default();
    done(json!({
        "environment": std::env::vars().count(),
        "arguments": std::env::args().count(),
        "file": text(std::fs::read("/etc/passwd").map(drop)),
        "directory": text(std::fs::read_dir("/").map(drop)),
        "connect": text(std::net::TcpStream::connect("127.0.0.1:1").map(drop)),
        "listen": text(std::net::TcpListener::bind("127.0.0.1:0").map(drop)),
        "udp": text(std::net::UdpSocket::bind("127.0.0.1:0").map(drop)),
        "lookup": text(std::net::ToSocketAddrs::to_socket_addrs("mail.demo:80").map(drop)),
        "http": http::send("http://mail.demo/", None, None, None).err(),
        "cluster": cluster::get(&secret()).err().map(|error| error.to_string()),
        "now": now,
        "random": wasip2::random::random::get_random_u64().to_string(),
    }))
}
