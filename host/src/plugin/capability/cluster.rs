//! `berth:plugin/cluster`: linked, so that guests of every SDK instantiate, but not answered by this version of the host.

use crate::plugin::{
    bindings::berth::plugin::cluster::{Host, Json, Kind, ObjectRef, Page, ReadError},
    instance::State,
};

const NOT_YET: &str = "this version of Berth answers no reads of the cluster yet; use what is in the object and the settings";

impl crate::plugin::bindings::berth::plugin::types::Host for State {}

impl Host for State {
    fn get(&mut self, _target: ObjectRef) -> Result<Option<Json>, ReadError> {
        Err(ReadError::Forbidden(NOT_YET.into()))
    }

    fn list(&mut self, _: Kind, _: Option<String>, _: String, _: u32, _: Option<String>) -> Result<Page, ReadError> {
        Err(ReadError::Forbidden(NOT_YET.into()))
    }
}
