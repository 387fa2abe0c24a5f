//! Components that differ in nothing but their digest.

/// The same component with a custom section of this name at its end.
///
/// # Panics
/// When the name has more than 120 bytes.
pub fn relabelled(component: &[u8], name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).ok().filter(|length| *length <= 120).expect("a short name");
    [component, &[0, length + 1, length], name.as_bytes()].concat()
}
