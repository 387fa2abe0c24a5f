//! One HTTP exchange over `wasi:http`, blocking.

use wasip2::{
    http::{
        outgoing_handler,
        types::{ErrorCode, Fields, IncomingBody, IncomingResponse, Method, OutgoingBody, OutgoingRequest, RequestOptions, Scheme},
    },
    io::streams::StreamError,
};

use crate::http::{Fault, Outgoing, Response};

/// `blocking-write-and-flush` traps on more.
const MOST_PER_WRITE: usize = 4096;
const MOST_PER_READ: u64 = 64 * 1024;

/// Sends a request and reads the whole answer.
pub fn send(outgoing: Outgoing) -> Result<Response, Fault> {
    let body = outgoing.body.as_slice();
    let request = request(&outgoing)?;
    let stream = request.body().map_err(|()| io("the request has no body"))?;
    // The host takes the request before its body: written first, a body larger than the host's buffer waits for ever.
    let pending = outgoing_handler::handle(request, options(&outgoing)).map_err(fault)?;
    let written = write(stream, body);
    pending.subscribe().block();
    let answer = match pending.get() {
        Some(Ok(Ok(answer))) => answer,
        Some(Ok(Err(code))) => return Err(fault(code)),
        _ => return Err(io("the host gave no answer")),
    };
    // An answer says more than a body that was not taken whole: it can be the reason for that.
    let response = read(&answer)?;
    if response.status() < 300 { written.map(|()| response) } else { Ok(response) }
}

fn request(outgoing: &Outgoing) -> Result<OutgoingRequest, Fault> {
    let invalid = |what: &str| Fault::Invalid(what.to_owned());
    let (scheme, rest) = outgoing.url.split_once("://").ok_or_else(|| invalid("the URL has no scheme such as http://"))?;
    let scheme = match scheme {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        _ => return Err(invalid("the URL's scheme is neither http nor https")),
    };
    let rest = rest.split('#').next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    if authority.is_empty() || authority.contains('@') {
        return Err(invalid("the URL needs a host, without user and password before it"));
    }
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let method = match outgoing.method.as_str() {
        "GET" => Method::Get,
        "POST" => Method::Post,
        "PUT" => Method::Put,
        "DELETE" => Method::Delete,
        other => Method::Other(other.to_owned()),
    };

    let headers = Fields::new();
    for (name, value) in &outgoing.headers {
        headers
            .append(name, value.as_bytes())
            .map_err(|_| Fault::Invalid(format!("the header {name} is not allowed, or has no valid value")))?;
    }
    if !outgoing.body.is_empty() {
        let length = outgoing.body.len().to_string();
        headers.append("content-length", length.as_bytes()).map_err(|_| invalid("the length of the body was refused"))?;
    }
    let request = OutgoingRequest::new(headers);
    request.set_method(&method).map_err(|()| invalid("the method is not valid"))?;
    request.set_scheme(Some(&scheme)).map_err(|()| invalid("the URL's scheme is not valid"))?;
    request.set_authority(Some(authority)).map_err(|()| invalid("the URL's host is not valid"))?;
    request.set_path_with_query(Some(&path)).map_err(|()| invalid("the URL's path is not valid"))?;
    Ok(request)
}

fn options(outgoing: &Outgoing) -> Option<RequestOptions> {
    let nanos = u64::try_from(outgoing.timeout?.as_nanos()).unwrap_or(u64::MAX);
    let options = RequestOptions::new();
    // A host without such timeouts still has its own.
    let _ = (options.set_connect_timeout(Some(nanos)), options.set_first_byte_timeout(Some(nanos)));
    Some(options)
}

fn write(body: OutgoingBody, bytes: &[u8]) -> Result<(), Fault> {
    if !bytes.is_empty() {
        let stream = body.write().map_err(|()| io("the request's body cannot be written"))?;
        for chunk in bytes.chunks(MOST_PER_WRITE) {
            stream.blocking_write_and_flush(chunk).map_err(|_| io("the connection broke while the request was sent"))?;
        }
    }
    OutgoingBody::finish(body, None).map_err(fault)
}

fn read(answer: &IncomingResponse) -> Result<Response, Fault> {
    let headers =
        answer.headers().entries().into_iter().map(|(name, value)| (name, String::from_utf8_lossy(&value).into_owned())).collect();
    let incoming = answer.consume().map_err(|()| io("the answer has no body"))?;
    let body = collect(&incoming)?;
    Ok(Response::from_parts(answer.status(), headers, body))
}

fn collect(incoming: &IncomingBody) -> Result<Vec<u8>, Fault> {
    let stream = incoming.stream().map_err(|()| io("the answer's body cannot be read"))?;
    let mut body = Vec::new();
    loop {
        match stream.blocking_read(MOST_PER_READ) {
            Ok(chunk) => body.extend(chunk),
            Err(StreamError::Closed) => return Ok(body),
            Err(StreamError::LastOperationFailed(error)) => {
                return Err(Fault::Io(format!("the answer broke off: {}", error.to_debug_string())));
            }
        }
    }
}

fn io(what: &str) -> Fault {
    Fault::Io(what.to_owned())
}

fn fault(code: ErrorCode) -> Fault {
    let text = match code {
        ErrorCode::HttpRequestDenied => return Fault::Denied,
        ErrorCode::HttpRequestUriInvalid => return Fault::Invalid("the URL is not valid".to_owned()),
        ErrorCode::DnsTimeout | ErrorCode::DnsError(_) => "the host's name does not resolve",
        ErrorCode::ConnectionRefused => "connection refused",
        ErrorCode::ConnectionTerminated | ErrorCode::HttpResponseIncomplete => "the connection broke off",
        ErrorCode::ConnectionTimeout => "no connection in time",
        ErrorCode::ConnectionReadTimeout | ErrorCode::HttpResponseTimeout => "no answer in time",
        ErrorCode::HttpResponseBodySize(_) => "the answer is larger than the host allows",
        ErrorCode::TlsCertificateError => "the certificate is not trusted",
        ErrorCode::InternalError(Some(text)) => return Fault::Io(text),
        ErrorCode::ConnectionLimitReached => "too many connections",
        // The rest is rare, and the names of all would be a fortieth of a plugin.
        _ => "the exchange broke an HTTP or TLS rule, or a limit of the host",
    };
    io(text)
}
