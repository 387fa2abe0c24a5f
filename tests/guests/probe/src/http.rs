//! The least HTTP client that can send a request and read an answer.

use serde_json::{Map, Value};
use wasip2::http::{
    outgoing_handler,
    types::{Fields, IncomingBody, Method, OutgoingBody, OutgoingRequest, Scheme},
};

/// Begins to send a request whose length nobody knows, and leaves it so: nothing is finished and nothing is dropped. The body and its
/// stream have earlier places among the handles than the answer, so that they go first when the run ends.
pub fn begin(url: &str) {
    let places = (Fields::new(), Fields::new());
    let request = request(url, Some("POST"), None).expect("a URL");
    drop(places);
    let outgoing = request.body().expect("the first");
    let stream = outgoing.write().expect("the first");
    let future = outgoing_handler::handle(request, None).expect("sent");
    stream.blocking_write_and_flush(b"half of it").expect("written");
    std::mem::forget((stream, outgoing, future));
}

fn request(url: &str, method: Option<&str>, headers: Option<&Map<String, Value>>) -> Result<OutgoingRequest, String> {
    let (scheme, rest) = match url.split_once("://") {
        Some(("http", rest)) => (Scheme::Http, rest),
        Some(("https", rest)) => (Scheme::Https, rest),
        _ => return Err(format!("not a URL: {url}")),
    };
    let (authority, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
    let fields = Fields::new();
    for (name, value) in headers.into_iter().flatten() {
        fields.append(name, value.as_str().unwrap_or_default().as_bytes()).map_err(|error| format!("{error:?}"))?;
    }
    let request = OutgoingRequest::new(fields);
    request.set_scheme(Some(&scheme)).map_err(|()| "bad scheme")?;
    request.set_authority(Some(authority)).map_err(|()| "bad authority")?;
    request.set_path_with_query(Some(path)).map_err(|()| "bad path")?;
    let method = match method {
        None | Some("GET") => Method::Get,
        Some("POST") => Method::Post,
        Some("TRACE") => Method::Trace,
        Some("CONNECT") => Method::Connect,
        Some(other) => Method::Other(other.to_owned()),
    };
    request.set_method(&method).map_err(|()| "bad method")?;
    Ok(request)
}

/// Sends a GET, or a POST where there is a body, unless a method is given. Answers the code and the body, or the error as text.
pub fn send(url: &str, method: Option<&str>, headers: Option<&Map<String, Value>>, body: Option<&str>) -> Result<(u16, Vec<u8>), String> {
    let request = request(url, method.or(body.map(|_| "POST")), headers)?;
    let outgoing = request.body().map_err(|()| "no body")?;
    let future = outgoing_handler::handle(request, None).map_err(|error| format!("{error:?}"))?;
    {
        let stream = outgoing.write().map_err(|()| "no stream")?;
        for chunk in body.unwrap_or_default().as_bytes().chunks(4096) {
            stream.blocking_write_and_flush(chunk).map_err(|error| format!("writing the body: {error:?}"))?;
        }
    }
    OutgoingBody::finish(outgoing, None).map_err(|error| format!("{error:?}"))?;
    future.subscribe().block();
    let answer = future.get().ok_or("not ready")?.map_err(|()| "taken")?.map_err(|error| format!("{error:?}"))?;
    let code = answer.status();
    let incoming = answer.consume().map_err(|()| "consumed")?;
    let bytes = read(&incoming)?;
    Ok((code, bytes))
}

fn read(body: &IncomingBody) -> Result<Vec<u8>, String> {
    use wasip2::io::streams::StreamError;
    let stream = body.stream().map_err(|()| "no stream")?;
    let mut bytes = Vec::new();
    loop {
        match stream.blocking_read(64 << 10) {
            Ok(chunk) => bytes.extend(chunk),
            Err(StreamError::Closed) => return Ok(bytes),
            Err(StreamError::LastOperationFailed(error)) => {
                let code = wasip2::http::types::http_error_code(&error);
                return Err(code.map_or_else(|| error.to_debug_string(), |code| format!("{code:?}")));
            }
        }
    }
}
