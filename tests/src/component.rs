//! Components that are wrong or otherwise in some way, made from bytes.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wasm_encoder::Encode;

/// A component beside which lies a core module with a great deal to compile: three functions of 300,000 blocks.
pub fn slow_to_compile(component: &[u8]) -> Vec<u8> {
    // block; local.get 0; br_if 0; local.get 0; i32.const 7; i32.mul; local.set 0; end
    let block = [0x02, 0x40, 0x20, 0, 0x0d, 0, 0x20, 0, 0x41, 7, 0x6c, 0x21, 0, 0x0b];
    let body: Vec<u8> = [vec![0], block.repeat(300_000), vec![0x20, 0, 0x0b]].concat();
    let function = encoded(&body[..]);
    let types = section(1, &[1, 0x60, 1, 0x7f, 1, 0x7f]);
    let module = [b"\0asm\x01\0\0\0".to_vec(), types, section(3, &[3, 0, 0, 0]), section(10, &[vec![3], function.repeat(3)].concat())];
    [component.to_vec(), section(1, &module.concat())].concat()
}

/// The same component for another version of what it imports and exports.
pub fn of_version(component: &[u8], version: &str) -> Vec<u8> {
    const OURS: &[u8] = b"berth:plugin/handler@0.1.0";
    let theirs = format!("berth:plugin/handler@{version}");
    assert_eq!(OURS.len(), theirs.len(), "no size in the component may change");
    let mut bytes = component.to_vec();
    let places: Vec<_> = (0..bytes.len() - OURS.len()).filter(|at| bytes[*at..].starts_with(OURS)).collect();
    assert!(!places.is_empty(), "the component exports its handler");
    for at in places {
        bytes[at..at + OURS.len()].copy_from_slice(theirs.as_bytes());
    }
    bytes
}

/// The same component with a lie about its texts: all of them are said to be UTF-16, and are UTF-8 as before.
pub fn said_to_be_utf16(component: &[u8]) -> Vec<u8> {
    const HEADER: usize = 8;
    const CANONICAL_FUNCTIONS: u8 = 8;
    let mut bytes = component.to_vec();
    let mut at = HEADER;
    while at < bytes.len() {
        let id = bytes[at];
        at += 1;
        let end = unleb(&bytes, &mut at) + at;
        if id == CANONICAL_FUNCTIONS {
            let count = unleb(&bytes, &mut at);
            (0..count).for_each(|_| function_with_utf16(&mut bytes, &mut at));
        }
        at = end;
    }
    bytes
}

/// `canon lift` and `canon lower` have options, of which 0 is UTF-8 and 1 is UTF-16; what acts on resources has none.
fn function_with_utf16(bytes: &mut [u8], at: &mut usize) {
    let kind = unleb(bytes, at);
    if kind > 1 {
        unleb(bytes, at);
        return;
    }
    *at += 1;
    unleb(bytes, at);
    for _ in 0..unleb(bytes, at) {
        match bytes[*at] {
            encoding @ 0..=2 => {
                bytes[*at] = if encoding == 0 { 1 } else { encoding };
                *at += 1;
            }
            _ => {
                *at += 1;
                unleb(bytes, at);
            }
        }
    }
    if kind == 0 {
        unleb(bytes, at);
    }
}

fn unleb(bytes: &[u8], at: &mut usize) -> usize {
    let (mut number, mut shift) = (0, 0);
    loop {
        let byte = bytes[*at];
        *at += 1;
        number |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return number;
        }
    }
}

/// The same behaviour under another digest: a custom section of this name at the end.
pub fn relabelled(component: &[u8], name: &str) -> Vec<u8> {
    [component.to_vec(), custom(name, &[])].concat()
}

/// The same behaviour in so many bytes: a custom section at the end, of what no compression makes smaller, and a few bytes around it.
pub fn of_size(component: &[u8], bytes: usize) -> Vec<u8> {
    let noise: Vec<u8> = StdRng::seed_from_u64(1).random_iter().take(bytes.saturating_sub(component.len())).collect();
    [component.to_vec(), custom("noise", &noise)].concat()
}

/// As `*.wasm.gz`.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("a vector takes all that is written");
    encoder.finish().expect("a vector takes all that is written")
}

fn custom(name: &str, content: &[u8]) -> Vec<u8> {
    section(0, &[&encoded(name), content].concat())
}

fn section(id: u8, content: &[u8]) -> Vec<u8> {
    [vec![id], encoded(content)].concat()
}

/// A number in as many bytes as it takes; bytes with their number before them.
fn encoded(it: &(impl Encode + ?Sized)) -> Vec<u8> {
    let mut bytes = Vec::new();
    it.encode(&mut bytes);
    bytes
}
