//! What a guest can ask of the host, one file for each capability.

pub mod cluster;
pub mod gate;
pub mod http;
pub mod log;
pub mod sockets;
