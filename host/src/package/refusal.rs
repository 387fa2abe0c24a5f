//! Why a package is not served: a reason for machines and a sentence for people.

use std::fmt;

/// A package or component that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One of [`reason`].
    pub reason: &'static str,
    /// A sentence: what is wrong and what to do.
    pub message: String,
}

impl Refusal {
    /// Longest message, in bytes: it goes into a status and an Event, whose notes end at 1 KiB.
    pub const MAX_MESSAGE: usize = 900;

    /// With one of the words of [`reason`]. A message that is too long is cut.
    pub fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: shorten(message.into(), Self::MAX_MESSAGE) }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl std::error::Error for Refusal {}

/// At most `limit` bytes of a text, with an ellipsis where some were cut. A sentence stays one.
fn shorten(mut text: String, limit: usize) -> String {
    const CUT: &str = "….";
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit - CUT.len()));
        text.push_str(CUT);
    }
    text
}

/// The closed set of reasons: the `reason` of a `Plugin` object's condition.
pub mod reason {
    /// Not exactly one component, or bytes that cannot be decompressed.
    pub const INVALID_PACKAGE: &str = "InvalidPackage";
    /// Beyond a size limit.
    pub const TOO_LARGE: &str = "TooLarge";
    /// `plugin.yaml` does not say what it may.
    pub const INVALID_CONFIG: &str = "InvalidConfig";
    /// Not a WebAssembly component.
    pub const NOT_A_COMPONENT: &str = "NotAComponent";
    /// A component with imports or exports that this host does not know.
    pub const UNKNOWN_WORLD: &str = "UnknownWorld";
    /// Compilation failed or went beyond its bounds.
    pub const COMPILE_FAILED: &str = "CompileFailed";
    /// The trial instance trapped or ran into a limit.
    pub const TRIAL_FAILED: &str = "TrialFailed";
    /// What `describe` returned is no valid claim.
    pub const INVALID_CLAIM: &str = "InvalidClaim";
    /// It failed where the version before it did not.
    pub const ROLLED_BACK: &str = "RolledBack";
    /// Another, older plugin reconciles the kind.
    pub const KIND_TAKEN: &str = "KindTaken";
    /// No CustomResourceDefinition of the kind is there.
    pub const WAITING_FOR_CRD: &str = "WaitingForCRD";
    /// The CustomResourceDefinition has another plural or scope than the claim.
    pub const KIND_MISMATCH: &str = "KindMismatch";
    /// The CustomResourceDefinition does not serve the claimed version.
    pub const VERSION_NOT_SERVED: &str = "VersionNotServed";
    /// The CustomResourceDefinition lacks the status subresource.
    pub const NO_STATUS_SUBRESOURCE: &str = "NoStatusSubresource";
    /// The CustomResourceDefinition's schema lacks a field of the status that the claim names.
    pub const NO_STATUS_FIELD: &str = "NoStatusField";
    /// The host's ServiceAccount may not do what the kind needs.
    pub const FORBIDDEN: &str = "Forbidden";
    /// The host itself could not carry out a gate; it tries again.
    pub const HOST_FAILURE: &str = "HostFailure";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let refusal = Refusal::new(reason::TOO_LARGE, "é".repeat(1000));
        assert!(refusal.message.len() <= Refusal::MAX_MESSAGE && refusal.message.ends_with("é…."), "{refusal}");
        assert_eq!(Refusal::new(reason::TOO_LARGE, "Short.").message, "Short.");
    }
}
