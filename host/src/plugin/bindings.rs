//! The contract in `wit/` as Rust types, generated.

wasmtime::component::bindgen!({
    path: "../wit",
    world: "reconciler",
    imports: { "berth:plugin/cluster.get": async, "berth:plugin/cluster.list": async },
    exports: { default: async },
});
