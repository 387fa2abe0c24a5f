//! What the tests and the demo of Berth stand on: the demo back ends, a fault proxy for the API server, and the harness.

pub mod account;
pub mod behaviour;
pub mod client;
pub mod cluster;
pub mod component;
pub mod eventually;
pub mod explore;
pub mod exporter;
pub mod exposition;
pub mod gateway;
pub mod host;
pub mod laws;
pub mod ledger;
pub mod process;
pub mod proxy;
pub mod resource;
pub mod server;
pub mod stage;
pub mod tls;
pub mod workspace;
