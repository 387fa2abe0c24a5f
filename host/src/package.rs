//! A plugin as it was delivered: bytes and `plugin.yaml` in, a checked [`Package`] out. Knows neither Kubernetes nor wasmtime.

use std::{
    fmt,
    io::{self, Read},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use self::{
    allowed::{AllowedHost, Ca, Credentials, Holder},
    ceilings::Ceilings,
    config::{Backoff, Config, ceiling},
    limits::{RunLimits, flag},
    origin::{HostPattern, InvalidHost, Origin},
    refusal::{Refusal, reason},
};

mod allowed;
#[cfg(test)]
mod boundary;
mod ceilings;
mod config;
mod field;
mod limits;
mod origin;
pub mod quantity;
mod refusal;

/// Largest component, after decompression. JavaScript and Python guests have 12 to 18 MB before `wasm-opt`.
pub const MAX_COMPONENT: usize = 16 << 20;

/// Largest zstd window that is accepted, as a power of two: no frame of a component within [`MAX_COMPONENT`] needs a larger one, and
/// the decoder allocates a whole window on the word of the frame's header.
const MAX_ZSTD_WINDOW_LOG: u32 = 24;

/// Name of the configuration within a package.
pub const CONFIG_FILE: &str = "plugin.yaml";

/// A plugin, ready for the gates that need its component.
#[derive(Clone, Debug, PartialEq)]
pub struct Package {
    /// Name of the ConfigMap, or of the file without its suffix.
    pub name: String,
    /// The component, decompressed.
    pub component: Bytes,
    /// Of `component`, so that compression does not matter.
    pub digest: Digest,
    /// `plugin.yaml`, or the defaults.
    pub config: Config,
    /// SHA-256 of the text of `plugin.yaml`, in hexadecimal; of nothing where there is none.
    pub config_hash: String,
}

impl Package {
    /// Which version of the plugin it is.
    pub fn version(&self) -> Version {
        Version { digest: self.digest, config_hash: self.config_hash.clone() }
    }
}

/// SHA-256 of a decompressed component. As text: `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The 64 hexadecimal digits, without the prefix: fit for a file name.
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// The first 12 digits, for people.
    pub fn short(&self) -> String {
        hex(&self.0[..6])
    }
}

/// Tells one version of a plugin from another.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// Of its component.
    pub digest: Digest,
    /// SHA-256 of the text of its `plugin.yaml`, in hexadecimal; of nothing where there is none.
    pub config_hash: String,
}

impl fmt::Display for Version {
    /// Enough of both for people to tell versions apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.digest.short(), self.config_hash.get(..6).unwrap_or_default())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        const WANTED: &str = "expected \"sha256:\" and 64 hexadecimal digits";
        let digits = text
            .strip_prefix("sha256:")
            .filter(|digits| digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .ok_or(WANTED)?;
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).map_err(|_| WANTED)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string succeeds");
        text
    })
}

/// How a component is stored in a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// `NAME.wasm`
    Plain,
    /// `NAME.wasm.gz`
    Gzip,
    /// `NAME.wasm.zst`
    Zstd,
}

impl Encoding {
    /// By the file's name, with the name without its suffix; none where it does not name a component.
    pub fn of(file: &str) -> Option<(&str, Self)> {
        [(".wasm", Self::Plain), (".wasm.gz", Self::Gzip), (".wasm.zst", Self::Zstd)]
            .into_iter()
            .find_map(|(suffix, encoding)| file.strip_suffix(suffix).filter(|stem| !stem.is_empty()).map(|stem| (stem, encoding)))
    }
}

/// Checks what was delivered under `name`: exactly one component, and `plugin.yaml` or nothing.
///
/// Nothing larger than [`MAX_COMPONENT`] is ever held, whatever the bytes claim.
pub fn open(name: &str, files: impl Iterator<Item = (String, Bytes)>) -> Result<Package, Refusal> {
    check_name(name)?;
    let mut components = Vec::new();
    let mut config = None;
    for (file, bytes) in files {
        if file == CONFIG_FILE {
            config = Some(bytes);
        } else if let Some((_, encoding)) = Encoding::of(&file) {
            components.push((file, encoding, bytes));
        } else if looks_like_config(&file) {
            let message = format!("{file:?} is not read: the configuration of a plugin is in {CONFIG_FILE:?}; rename or remove it.");
            return Err(Refusal::new(reason::INVALID_CONFIG, message));
        }
    }
    let (file, encoding, bytes) = only(components)?;
    let component = decompress(&file, encoding, bytes)?;
    let text = config.unwrap_or_default();
    Ok(Package {
        name: name.to_owned(),
        digest: Digest::of(&component),
        component,
        config: Config::parse(&text)?,
        config_hash: hex(&Sha256::digest(&text)),
    })
}

/// The `Plugin` object has the name too.
fn check_name(name: &str) -> Result<(), Refusal> {
    if is_name(name) {
        return Ok(());
    }
    let message =
        format!("{name:?} cannot be the name of a plugin: lower-case letters, digits, '-' and '.' only, as for any Kubernetes object.");
    Err(Refusal::new(reason::INVALID_PACKAGE, message))
}

/// Whether Kubernetes accepts it as the name of an object.
fn is_name(name: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// A file that was surely meant as configuration; anything else beside a component (a README) is left alone.
fn looks_like_config(file: &str) -> bool {
    [".yaml", ".yml", ".json", ".toml"].iter().any(|suffix| file.ends_with(suffix))
}

fn only(mut components: Vec<(String, Encoding, Bytes)>) -> Result<(String, Encoding, Bytes), Refusal> {
    match (components.pop(), components.is_empty()) {
        (Some(component), true) => Ok(component),
        (None, _) => {
            let message = "There is no component: exactly one file named *.wasm, *.wasm.gz or *.wasm.zst is needed.";
            Err(Refusal::new(reason::INVALID_PACKAGE, message))
        }
        (Some(last), false) => {
            let mut names: Vec<_> = components.into_iter().chain([last]).map(|(file, ..)| file).collect();
            names.sort();
            let message = format!("There are {} components ({}): exactly one is needed.", names.len(), names.join(", "));
            Err(Refusal::new(reason::INVALID_PACKAGE, message))
        }
    }
}

fn decompress(file: &str, encoding: Encoding, bytes: Bytes) -> Result<Bytes, Refusal> {
    let unreadable = |error: io::Error| {
        let message = format!("{file:?} cannot be decompressed: {error}.");
        Refusal::new(reason::INVALID_PACKAGE, message)
    };
    let component = match encoding {
        Encoding::Plain if bytes.len() > MAX_COMPONENT => None,
        Encoding::Plain => Some(bytes),
        Encoding::Gzip => read_capped(flate2::bufread::MultiGzDecoder::new(&*bytes)).map_err(unreadable)?,
        Encoding::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(&*bytes).map_err(unreadable)?;
            decoder.window_log_max(MAX_ZSTD_WINDOW_LOG).map_err(unreadable)?;
            read_capped(decoder).map_err(unreadable)?
        }
    };
    component.ok_or_else(|| {
        let message = format!("The component is larger than {} MiB after decompression (fixed).", MAX_COMPONENT >> 20);
        Refusal::new(reason::TOO_LARGE, message)
    })
}

/// Everything, or none where it is more than [`MAX_COMPONENT`]: then one byte too many was read and no more.
fn read_capped(reader: impl Read) -> io::Result<Option<Bytes>> {
    let mut bytes = Vec::new();
    reader.take(MAX_COMPONENT as u64 + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() <= MAX_COMPONENT).then(|| bytes.into()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn gzip(bytes: &[u8]) -> Bytes {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).expect("writes");
        encoder.finish().expect("finishes").into()
    }

    fn zst(bytes: &[u8]) -> Bytes {
        zstd::encode_all(bytes, 3).expect("compresses").into()
    }

    fn open_all(files: &[(&str, Bytes)]) -> Result<Package, Refusal> {
        open("p", files.iter().map(|(file, bytes)| ((*file).to_owned(), bytes.clone())))
    }

    #[test]
    fn one_component_is_found_under_each_suffix_and_has_the_same_digest() {
        for (file, bytes) in [("a.wasm", Bytes::from_static(b"code")), ("b.wasm.gz", gzip(b"code")), ("c.wasm.zst", zst(b"code"))] {
            let package = open_all(&[("README.md", Bytes::new()), (file, bytes)]).expect(file);
            assert_eq!((&*package.component, package.digest), (&b"code"[..], Digest::of(b"code")), "{file}");
        }
        assert!(Digest::of(b"").to_string().starts_with("sha256:e3b0c44298fc"));
        assert_eq!(Digest::of(b"").short(), "e3b0c44298fc");
        assert_eq!(Digest::try_from(Digest::of(b"").to_string()), Ok(Digest::of(b"")));
        for text in ["", "sha256:", "sha256:zz", &format!("sha256:{}", "é".repeat(32)), &format!("md5:{}", "0".repeat(64))] {
            assert!(Digest::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn no_component_and_two_components_are_refused_with_their_names() {
        let none = open_all(&[("x.cwasm", Bytes::new()), (".wasm", Bytes::new())]).expect_err("none");
        assert!(none.message.contains("exactly one file named *.wasm"), "{none}");
        let two = open_all(&[("b.wasm", Bytes::new()), ("a.wasm.gz", Bytes::new())]).expect_err("two");
        assert!(two.message.contains("2 components (a.wasm.gz, b.wasm)"), "{two}");
        assert_eq!(two.reason, reason::INVALID_PACKAGE);
    }

    #[test]
    fn bombs_are_refused_and_the_largest_allowed_component_is_not() {
        let largest = vec![0; MAX_COMPONENT];
        let bomb = vec![0; MAX_COMPONENT + 1];
        for (file, compress) in
            [("a.wasm", (|b| Bytes::copy_from_slice(b)) as fn(&[u8]) -> Bytes), ("a.wasm.gz", gzip), ("a.wasm.zst", zst)]
        {
            assert!(open_all(&[(file, compress(&largest))]).is_ok(), "{file}");
            assert_eq!(open_all(&[(file, compress(&bomb))]).expect_err(file).reason, reason::TOO_LARGE);
        }
    }

    #[test]
    fn a_zstd_frame_that_asks_for_a_huge_window_is_refused() {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("encoder");
        encoder.window_log(27).expect("window");
        encoder.write_all(b"code").expect("writes");
        let refusal = open_all(&[("a.wasm.zst", encoder.finish().expect("finishes").into())]).expect_err("refused");
        assert!(refusal.message.contains("cannot be decompressed"), "{refusal}");
    }

    #[test]
    fn truncated_and_mislabelled_files_are_refused() {
        let whole = zst(&[7; 100_000]);
        let half = whole.slice(..whole.len() / 2);
        for (file, bytes) in [("a.wasm.zst", half), ("a.wasm.gz", whole), ("b.wasm.zst", gzip(b"x"))] {
            assert_eq!(open_all(&[(file, bytes)]).expect_err(file).reason, reason::INVALID_PACKAGE);
        }
    }

    #[test]
    fn a_misnamed_configuration_is_refused_rather_than_ignored() {
        let refusal = open_all(&[("a.wasm", Bytes::new()), ("plugin.yml", Bytes::new())]).expect_err("refused");
        assert!(refusal.message.contains("plugin.yaml"), "{refusal}");
    }

    #[test]
    fn the_hash_of_the_configuration_follows_its_text() {
        let with = |text: &'static str| open_all(&[("a.wasm", Bytes::new()), (CONFIG_FILE, Bytes::from_static(text.as_bytes()))]);
        assert_ne!(with("paused: true").expect("opens").config_hash, with("paused: false").expect("opens").config_hash);
        assert_eq!(with("").expect("opens").config_hash, open_all(&[("a.wasm", Bytes::new())]).expect("opens").config_hash);
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused() {
        for name in ["", "A", "a_b", "-a", "a..b", &"a".repeat(254)] {
            assert!(open(name, [("a.wasm".to_owned(), Bytes::new())].into_iter()).is_err(), "{name:?}");
        }
        assert!(open("email-request.v2", [("a.wasm".to_owned(), Bytes::new())].into_iter()).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_opened_or_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..512), config in ".{0,80}") {
            for file in ["a.wasm", "a.wasm.gz", "a.wasm.zst"] {
                let _ = open_all(&[(file, bytes.clone().into()), (CONFIG_FILE, config.clone().into())]);
            }
        }

        #[test]
        fn every_refusal_is_a_sentence(name in ".{0,8}", file in "[a-z]{0,3}(\\.wasm|\\.gz|\\.yaml|\\.zst){0,2}", bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Err(refusal) = open(&name, [(file, Bytes::from(bytes))].into_iter()) {
                prop_assert!(refusal.message.ends_with('.') && refusal.message.len() < 1024, "{refusal}");
            }
        }
    }
}
