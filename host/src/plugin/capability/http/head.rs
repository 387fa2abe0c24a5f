//! What a guest makes of a request before it is sent, in bounds: these functions stand in the place of those of `wasi:http/types`.
//!
//! # Guarantees
//! Whatever the host keeps for a handle is bounded, and is taken from the guest's own memory when it comes to be. It is not given back:
//! what a guest drops may go on living in another handle.

use wasmtime::{
    StoreContextMut,
    component::{Linker, LinkerInstance, Resource},
};
use wasmtime_wasi_http::p2::{
    HeaderError,
    bindings::http::types::{self, Fields, Host, HostFields, HostOutgoingRequest, HostOutgoingResponse, Method},
};

use crate::plugin::{
    instance::State,
    limits::{AUTHORITY, BODY_CHUNK, METHOD, PATH},
};

/// The interface, in the version that wasmtime has linked.
const TYPES: &str = "wasi:http/types@0.2.12";

/// What a handle takes beside what is in it.
const HANDLE: usize = 512;

/// What a header takes beside its texts: its place in a map that doubles.
const HEADER: usize = 256;

/// What a body takes: one chunk that is queued, and one that the queue needs.
const BODY: usize = 2 * BODY_CHUNK + HANDLE;

type Store<'s> = StoreContextMut<'s, State>;
type Request = Resource<types::OutgoingRequest>;

/// Puts the bounded ones in the place of those of wasmtime.
pub fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    let mut types = linker.instance(TYPES)?;
    fields(&mut types)?;
    requests(&mut types)?;
    linker.allow_shadowing(false);
    Ok(())
}

fn fields(types: &mut LinkerInstance<'_, State>) -> wasmtime::Result<()> {
    types.func_wrap("[constructor]fields", |mut store: Store<'_>, (): ()| {
        let state = store.data_mut();
        state.keep(HANDLE)?;
        Ok((HostFields::new(&mut state.for_http())?,))
    })?;
    types.func_wrap("[static]fields.from-list", |mut store: Store<'_>, (entries,): (Vec<(String, Vec<u8>)>,)| {
        let state = store.data_mut();
        let texts = entries.iter().map(|(name, value)| HEADER + name.len() + value.len());
        state.keep(HANDLE + texts.sum::<usize>())?;
        let made = HostFields::from_list(&mut state.for_http(), entries);
        Ok((plain(state, made)?,))
    })?;
    type Set = (Resource<Fields>, String, Vec<Vec<u8>>);
    types.func_wrap("[method]fields.set", |mut store: Store<'_>, (fields, name, values): Set| {
        let state = store.data_mut();
        state.keep(name.len() + values.iter().map(|value| HEADER + value.len()).sum::<usize>())?;
        let set = HostFields::set(&mut state.for_http(), fields, name, values);
        Ok((plain(state, set)?,))
    })?;
    type Append = (Resource<Fields>, String, Vec<u8>);
    types.func_wrap("[method]fields.append", |mut store: Store<'_>, (fields, name, value): Append| {
        let state = store.data_mut();
        state.keep(HEADER + name.len() + value.len())?;
        let appended = HostFields::append(&mut state.for_http(), fields, name, value);
        Ok((plain(state, appended)?,))
    })?;
    types.func_wrap("[method]fields.clone", |mut store: Store<'_>, (fields,): (Resource<Fields>,)| {
        let state = store.data_mut();
        let entries =
            state.for_http().table.get(&fields)?.iter().map(|(name, value)| HEADER + name.as_str().len() + value.len()).sum::<usize>();
        state.keep(HANDLE + entries)?;
        Ok((HostFields::clone(&mut state.for_http(), fields)?,))
    })
}

fn requests(types: &mut LinkerInstance<'_, State>) -> wasmtime::Result<()> {
    types.func_wrap("[method]outgoing-request.body", |mut store: Store<'_>, (request,): (Request,)| {
        let state = store.data_mut();
        state.keep(BODY)?;
        Ok((HostOutgoingRequest::body(&mut state.for_http(), request)?,))
    })?;
    types.func_wrap("[method]outgoing-response.body", |mut store: Store<'_>, (response,): (Resource<types::OutgoingResponse>,)| {
        let state = store.data_mut();
        state.keep(BODY)?;
        Ok((HostOutgoingResponse::body(&mut state.for_http(), response)?,))
    })?;
    types.func_wrap("[method]outgoing-request.set-method", |mut store: Store<'_>, (request, method): (Request, Method)| {
        if matches!(&method, Method::Other(name) if name.len() > METHOD) {
            return Ok((Err(()),));
        }
        Ok((HostOutgoingRequest::set_method(&mut store.data_mut().for_http(), request, method)?,))
    })?;
    types.func_wrap(
        "[method]outgoing-request.set-path-with-query",
        |mut store: Store<'_>, (request, path): (Request, Option<String>)| {
            let (state, length) = (store.data_mut(), path.as_ref().map_or(0, String::len));
            if length > PATH {
                return Ok((Err(()),));
            }
            state.keep(length)?;
            Ok((HostOutgoingRequest::set_path_with_query(&mut state.for_http(), request, path)?,))
        },
    )?;
    types.func_wrap("[method]outgoing-request.set-authority", |mut store: Store<'_>, (request, authority): (Request, Option<String>)| {
        if authority.as_ref().is_some_and(|authority| authority.len() > AUTHORITY) {
            return Ok((Err(()),));
        }
        Ok((HostOutgoingRequest::set_authority(&mut store.data_mut().for_http(), request, authority)?,))
    })
}

/// As the generated bindings do it: a fault of the guest is an answer, any other a trap.
fn plain<T>(state: &mut State, result: Result<T, HeaderError>) -> wasmtime::Result<Result<T, types::HeaderError>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(error) => Ok(Err(Host::convert_header_error(&mut state.for_http(), error)?)),
    }
}
