//! Whether bytes are a component of a world that this host knows, read from its outline before anything is compiled.

use wasmparser::{Encoding, Parser, Payload};

use super::text::one_line;
use crate::{
    package::{Refusal, reason},
    text::cut,
};

/// The export that makes a component a plugin.
const HANDLER: &str = "berth:plugin/handler";

/// Interfaces of the contract that a guest may import.
const CONTRACT: &[&str] = &["berth:plugin/types", "berth:plugin/cluster", "berth:plugin/log"];

/// The track of the contract.
const TRACK: &str = "0.1";

/// Packages of WASI that are linked.
const WASI: &[&str] = &["wasi:cli", "wasi:clocks", "wasi:filesystem", "wasi:http", "wasi:io", "wasi:random", "wasi:sockets"];

/// The track of WASI.
const WASI_TRACK: &str = "0.2";

/// The first gate that needs the bytes.
pub fn check(bytes: &[u8]) -> Result<(), Refusal> {
    let outline = Outline::read(bytes)?;
    for name in &outline.imports {
        import(name).map_err(|message| Refusal::new(reason::UNKNOWN_WORLD, message))?;
    }
    exports(&outline.exports).map_err(|message| Refusal::new(reason::UNKNOWN_WORLD, message))
}

#[derive(Default)]
struct Outline {
    imports: Vec<String>,
    exports: Vec<String>,
}

impl Outline {
    fn read(bytes: &[u8]) -> Result<Self, Refusal> {
        let not = |message: String| Refusal::new(reason::NOT_A_COMPONENT, message);
        if !bytes.starts_with(b"\0asm") {
            return Err(not(format!("The file is no WebAssembly: {}.", looks_like(bytes))));
        }
        let mut outline = Self::default();
        // Depth within the nested components and modules, whose imports and exports are their own.
        let mut depth = 0_usize;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload
                .map_err(|error| not(format!("The component is damaged or not whole ({} bytes): {}.", bytes.len(), error.message())))?
            {
                Payload::Version { encoding: Encoding::Module, .. } if depth == 0 => {
                    return Err(not(
                        "The file is a core module, not a component: build it for the target wasm32-wasip2, or make it one with wasm-tools component new.".into(),
                    ));
                }
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                Payload::ComponentImportSection(section) if depth == 0 => {
                    for import in section {
                        outline.imports.push(
                            import.map_err(|error| not(format!("The component is damaged: {}.", error.message())))?.name.name.to_owned(),
                        );
                    }
                }
                Payload::ComponentExportSection(section) if depth == 0 => {
                    for export in section {
                        outline.exports.push(
                            export.map_err(|error| not(format!("The component is damaged: {}.", error.message())))?.name.name.to_owned(),
                        );
                    }
                }
                _ => {}
            }
        }
        Ok(outline)
    }
}

/// What it is instead, for the mistakes that are made.
fn looks_like(bytes: &[u8]) -> String {
    let text = || String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).trim().to_owned();
    match bytes {
        [] => "it is empty".into(),
        [0x1f, 0x8b, ..] => "it looks like gzip, so its name has to end with .wasm.gz".into(),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "it looks like zstd, so its name has to end with .wasm.zst".into(),
        [b'\x7f', b'E', b'L', b'F', ..] => "it looks like native code; only .wasm is accepted".into(),
        _ if bytes.iter().all(|byte| *byte == 0) => format!("it is {} zero bytes", bytes.len()),
        _ if text().starts_with('<') => {
            format!("it looks like a web page, perhaps an error page of a download ({:?})", cut(&one_line(&text()), 40))
        }
        _ if text().starts_with("(component") || text().starts_with("(module") => "it looks like the text format; assemble it first".into(),
        _ => format!("it begins with {:02x?}", &bytes[..bytes.len().min(8)]),
    }
}

fn import(name: &str) -> Result<(), String> {
    let shown = cut(&one_line(name), 120);
    let (interface, version) = name.split_once('@').unwrap_or((name, ""));
    let package = interface.split('/').next().unwrap_or_default();
    let expected = match interface {
        _ if CONTRACT.contains(&interface) => TRACK,
        _ if WASI.contains(&package) => WASI_TRACK,
        _ if package == "berth:plugin" => {
            return Err(format!(
                "It imports {shown}, which this version of Berth does not have; it has {} at {TRACK}.",
                CONTRACT.join(", ")
            ));
        }
        _ => {
            return Err(format!(
                "It imports {shown}, which this host does not offer; it offers {} at {TRACK} and {} at {WASI_TRACK}.",
                CONTRACT.join(", "),
                WASI.join(", ")
            ));
        }
    };
    if on_track(version, expected) {
        return Ok(());
    }
    Err(format!("It imports {interface} in version {}, this host has {expected}: build it for {expected}.", cut(&one_line(version), 40)))
}

fn exports(names: &[String]) -> Result<(), String> {
    let versions: Vec<_> = names.iter().filter_map(|name| name.strip_prefix(HANDLER)?.strip_prefix('@')).collect();
    if let Some(other) = names.iter().find(|name| name.starts_with("berth:plugin/") && name.split('@').next() != Some(HANDLER)) {
        return Err(format!("It exports {}, which this version of Berth does not know.", cut(&one_line(other), 120)));
    }
    match versions.as_slice() {
        [] => Err(format!(
            "It does not export {HANDLER}@{TRACK}, so it is no plugin; its exports are: {}.",
            if names.is_empty() { "none".into() } else { cut(&one_line(&names.join(", ")), 300) }
        )),
        versions if versions.iter().any(|version| on_track(version, TRACK)) => Ok(()),
        [version, ..] => {
            Err(format!("It exports {HANDLER} in version {}, this host speaks {TRACK}: build it for {TRACK}.", cut(&one_line(version), 40)))
        }
    }
}

/// `0.1.x` without a pre-release: those are bound to one build of the host.
fn on_track(version: &str, track: &str) -> bool {
    let patch = version.strip_prefix(track).and_then(|rest| rest.strip_prefix('.'));
    patch.is_some_and(|patch| !patch.is_empty() && patch.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(bytes: &[u8]) -> String {
        let refusal = check(bytes).expect_err("refused");
        assert_eq!(refusal.reason, reason::NOT_A_COMPONENT);
        refusal.message
    }

    #[test]
    fn what_is_not_a_component_is_told_by_what_it_is() {
        for (bytes, words) in [
            (&b""[..], "empty"),
            (&[0; 64], "64 zero bytes"),
            (b"<!DOCTYPE html><title>404</title>", "web page"),
            (b"\x1f\x8b\x08", ".wasm.gz"),
            (b"\x28\xb5\x2f\xfd", ".wasm.zst"),
            (b"\x7fELF", "native code"),
            (b"(component)", "text format"),
            (b"\0asm\x01\0\0\0", "core module"),
            (b"\0asm", "damaged or not whole"),
            (b"\0asm\x0d\0\x01\0\x01\xff", "damaged or not whole"),
            (b"PK\x03\x04", "begins with"),
        ] {
            let message = refused(bytes);
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn imports_are_of_a_known_interface_and_track() {
        for name in ["wasi:http/outgoing-handler@0.2.99", "berth:plugin/log@0.1.7", "wasi:io/poll@0.2.0"] {
            assert_eq!(import(name), Ok(()));
        }
        for (name, words) in [
            ("berth:plugin/cluster@0.2.0", "berth:plugin/cluster in version 0.2.0, this host has 0.1"),
            ("wasi:http/types@0.3.0", "wasi:http/types in version 0.3.0, this host has 0.2"),
            ("wasi:http/types@0.2.0-rc-1", "0.2.0-rc-1"),
            ("berth:plugin/secrets@0.1.0", "does not have"),
            ("wasi:keyvalue/store@0.2.0", "does not offer"),
            ("env", "does not offer"),
            ("berth:plugin/log", "in version "),
        ] {
            let message = import(name).expect_err(name);
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn the_handler_is_exported_on_our_track() {
        let of = |names: &[&str]| exports(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["berth:plugin/handler@0.1.3", "helper"]), Ok(()));
        assert_eq!(of(&["berth:plugin/handler@0.2.0", "berth:plugin/handler@0.1.0"]), Ok(()));
        assert!(of(&[]).is_err_and(|message| message.contains("its exports are: none")));
        assert!(of(&["wasi:cli/run@0.2.3"]).is_err_and(|message| message.contains("wasi:cli/run@0.2.3")));
        assert!(of(&["berth:plugin/handler@0.2.0"]).is_err_and(|message| message.contains("version 0.2.0, this host speaks 0.1")));
        assert!(
            of(&["berth:plugin/handler@0.1.0", "berth:plugin/other@0.1.0"]).is_err_and(|message| message.contains("berth:plugin/other"))
        );
    }
}
