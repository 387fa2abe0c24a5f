//! A Lease as the election reads and writes it.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};

use super::Settings;
use crate::object;

/// A state of the Lease. Fields that are none of the election's are kept as they are.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Record(pub(super) Lease);

impl Record {
    /// What creates the Lease, held by us.
    pub(super) fn first(settings: &Settings, wall: Timestamp) -> Self {
        let metadata =
            ObjectMeta { namespace: Some(settings.namespace.clone()), name: Some(settings.name.clone()), ..ObjectMeta::default() };
        Self(Lease { metadata, spec: None }).held_by(settings, wall)
    }

    /// The same Lease held by us from now on, or still: then the time of acquisition and the count of transitions stay.
    pub(super) fn held_by(&self, settings: &Settings, wall: Timestamp) -> Self {
        let mut lease = self.to_write();
        let spec = lease.spec.get_or_insert_default();
        let wall = MicroTime(wall);
        if self.holder() != Some(&settings.identity) {
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
            spec.acquire_time = Some(wall.clone());
        }
        spec.holder_identity = Some(settings.identity.clone());
        spec.lease_duration_seconds = Some(whole_seconds(settings.duration));
        spec.renew_time = Some(wall);
        Self(lease)
    }

    /// The same Lease held by nobody.
    pub(super) fn released(&self) -> Self {
        let mut lease = self.to_write();
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        Self(lease)
    }

    /// Who wrote which field is for the API server to keep.
    fn to_write(&self) -> Lease {
        let mut lease = self.0.clone();
        lease.metadata.managed_fields = None;
        lease
    }

    /// Who holds it, if anybody.
    pub(super) fn holder(&self) -> Option<&str> {
        self.spec()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
    }

    /// For how long the holder said that it holds without a renewal.
    pub(super) fn duration(&self) -> Option<Duration> {
        self.spec()?.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs)
    }

    /// How often it changed hands.
    pub(super) fn transitions(&self) -> i32 {
        self.spec().and_then(|spec| spec.lease_transitions).unwrap_or(0)
    }

    /// The resourceVersion.
    pub(super) fn version(&self) -> &str {
        self.0.metadata.resource_version.as_deref().unwrap_or_default()
    }

    /// Whether this is a later state than the one of this resourceVersion.
    pub(super) fn newer_than(&self, version: &str) -> bool {
        object::newer(self.version(), version)
    }

    /// Whether nobody renewed it, took it or gave it up between this state and another.
    pub(super) fn unchanged_since(&self, other: &Self) -> bool {
        self.spec() == other.spec()
    }

    fn spec(&self) -> Option<&LeaseSpec> {
        self.0.spec.as_ref()
    }
}

fn whole_seconds(duration: Duration) -> i32 {
    let up = u64::from(duration.subsec_nanos() > 0);
    i32::try_from(duration.as_secs().saturating_add(up)).unwrap_or(i32::MAX)
}
