//! What makes the host keep things for the guest: bodies that nobody reads, names, headers and reads.

use wasip2::http::types::{Fields, Method, OutgoingRequest, OutgoingResponse};

use crate::berth::plugin::{cluster, types::ObjectRef};

/// Makes so many of one sort and holds them all. Answers how many the host took.
pub fn hoard(what: &str, count: u64) -> u64 {
    let large = "x".repeat(4_000_000);
    let request = || OutgoingRequest::new(Fields::new());
    match what {
        "bodies" => held(count, || {
            let request = request();
            fill(&request.body().ok()?, large.as_bytes());
            Some(request)
        }),
        "responses" => held(count, || {
            let response = OutgoingResponse::new(Fields::new());
            fill(&response.body().ok()?, large.as_bytes());
            Some(response)
        }),
        "methods" => held(count, || {
            let request = request();
            request.set_method(&Method::Other(large.clone())).ok()?;
            Some(request)
        }),
        "paths" => held(count, || {
            let request = request();
            request.set_path_with_query(Some(&format!("/{}", &large[..60_000]))).ok()?;
            Some(request)
        }),
        "authorities" => held(count, || {
            let request = request();
            request.set_authority(Some(&large[..60_000])).ok()?;
            Some(request)
        }),
        "fields" => held(count, || {
            let fields = Fields::new();
            for number in 0..80 {
                fields.append(&format!("name-{number}"), &large.as_bytes()[..100]).ok()?;
            }
            Some(fields)
        }),
        "header" => held(count, || {
            let fields = Fields::new();
            fields.append("large", &large.as_bytes()[..20_000]).ok()?;
            Some(fields)
        }),
        "reads" => held(count, || {
            let name = format!("x{}", &large[..60_000]);
            let target = ObjectRef { group: String::new(), version: "v1".into(), kind: "ConfigMap".into(), namespace: None, name };
            cluster::get(&target).ok()
        }),
        other => panic!("the probe does not know how to hoard {other:?}"),
    }
}

fn held<T>(count: u64, make: impl Fn() -> Option<T>) -> u64 {
    let kept: Vec<_> = (0..count).filter_map(|_| make()).collect();
    kept.len() as u64
}

/// Writes as much as the host takes without anybody reading it.
fn fill(body: &wasip2::http::types::OutgoingBody, bytes: &[u8]) {
    let Ok(stream) = body.write() else { return };
    while let Ok(room @ 1..) = stream.check_write() {
        if stream.write(&bytes[..bytes.len().min(room as usize)]).is_err() {
            return;
        }
    }
}
