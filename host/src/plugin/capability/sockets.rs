//! `wasi:sockets` and `wasi:filesystem`: linked, because some languages import them whether they use them or not, and denied at the door.
//!
//! # Guarantees
//! Neither a socket nor an address nor a folder is ever made, so that none of the functions on them can be called.
//!
//! # Caveats
//! What is denied of files is the question for folders, which a guest asks once: an interpreter may ask it whatever its script does.

use wasmtime::component::{HasSelf, Linker, Resource};
use wasmtime_wasi::{
    p2::{
        DynPollable, IoError, SocketError,
        bindings::{
            filesystem::{preopens, types::Descriptor},
            sockets::{
                ip_name_lookup::{self, HostResolveAddressStream, IpAddress, Network, ResolveAddressStream},
                network::{self, ErrorCode, HostNetwork, IpAddressFamily},
                tcp::TcpSocket,
                tcp_create_socket,
                udp::UdpSocket,
                udp_create_socket,
            },
        },
    },
    sockets::WasiSocketsView,
};

use super::gate::Call;
use crate::plugin::instance::State;

/// Puts these functions in the place of those of wasmtime, which would deny without a word.
pub fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    tcp_create_socket::add_to_linker::<State, HasSelf<State>>(linker, |state| state)?;
    udp_create_socket::add_to_linker::<State, HasSelf<State>>(linker, |state| state)?;
    ip_name_lookup::add_to_linker::<State, HasSelf<State>>(linker, |state| state)?;
    preopens::add_to_linker::<State, HasSelf<State>>(linker, |state| state)?;
    linker.allow_shadowing(false);
    Ok(())
}

fn denied<T>(state: &State, call: &Call<'_>) -> Result<T, SocketError> {
    // Without a permit for it in this version of the host, there is nothing to do with one.
    let _ = state.gate.check(call);
    Err(ErrorCode::AccessDenied.into())
}

/// As wasmtime has it: how an error becomes its code.
impl network::Host for State {
    fn network_error_code(&mut self, error: Resource<IoError>) -> wasmtime::Result<Option<ErrorCode>> {
        self.sockets().network_error_code(error)
    }

    fn convert_error_code(&mut self, error: SocketError) -> wasmtime::Result<ErrorCode> {
        self.sockets().convert_error_code(error)
    }
}

impl HostNetwork for State {
    fn drop(&mut self, network: Resource<Network>) -> wasmtime::Result<()> {
        HostNetwork::drop(&mut self.sockets(), network)
    }
}

impl tcp_create_socket::Host for State {
    fn create_tcp_socket(&mut self, _: IpAddressFamily) -> Result<Resource<TcpSocket>, SocketError> {
        denied(self, &Call::Socket)
    }
}

impl udp_create_socket::Host for State {
    async fn create_udp_socket(&mut self, _: IpAddressFamily) -> Result<Resource<UdpSocket>, SocketError> {
        denied(self, &Call::Socket)
    }
}

impl ip_name_lookup::Host for State {
    fn resolve_addresses(&mut self, _: Resource<Network>, _: String) -> Result<Resource<ResolveAddressStream>, SocketError> {
        denied(self, &Call::NameLookup)
    }
}

impl preopens::Host for State {
    fn get_directories(&mut self) -> wasmtime::Result<Vec<(Resource<Descriptor>, String)>> {
        let _ = self.gate.check(&Call::Files);
        Ok(Vec::new())
    }
}

/// There is no such stream, and so no handle of one.
impl HostResolveAddressStream for State {
    fn resolve_next_address(&mut self, _: Resource<ResolveAddressStream>) -> Result<Option<IpAddress>, SocketError> {
        denied(self, &Call::NameLookup)
    }

    fn subscribe(&mut self, _: Resource<ResolveAddressStream>) -> wasmtime::Result<Resource<DynPollable>> {
        wasmtime::bail!("there is no stream of addresses")
    }

    fn drop(&mut self, _: Resource<ResolveAddressStream>) -> wasmtime::Result<()> {
        Ok(())
    }
}
