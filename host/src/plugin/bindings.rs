//! The contract in `wit/` as Rust types, generated.

wasmtime::component::bindgen!({
    path: "../wit",
    world: "reconciler",
    exports: { default: async },
});
