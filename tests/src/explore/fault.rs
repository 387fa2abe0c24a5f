//! What is done to a host at one of its effects.

use std::{fmt, time::Duration};

use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::{Point, world::World};
use crate::{
    eventually::eventually,
    proxy::{Answer, Effect, Handle},
    resource::Resource,
};

/// How long a host may take to notice that its Lease is gone, on a busy machine.
const NOTICED: Duration = Duration::from_secs(20);

/// What happens at an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, and the request never arrives.
    KilledBefore,
    /// SIGKILL, after the server has done what was asked and before the host hears of it.
    KilledAfter,
    /// SIGTERM while the request is on its way.
    Terminated,
    /// Somebody else has the Lease while the request is on its way.
    LeaseTaken,
    /// The server has done what was asked, and answers 500.
    AnsweredWith500,
    /// The server has done what was asked, and the connection breaks instead of an answer.
    AnswerLost,
    /// The request never arrives and is never answered.
    Swallowed,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KilledBefore => "killed right before",
            Self::KilledAfter => "killed right after",
            Self::Terminated => "SIGTERM at",
            Self::LeaseTaken => "the Lease taken at",
            Self::AnsweredWith500 => "a 500 after",
            Self::AnswerLost => "a lost answer to",
            Self::Swallowed => "a black hole at",
        })
    }
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::KilledBefore,
        Self::KilledAfter,
        Self::Terminated,
        Self::LeaseTaken,
        Self::AnsweredWith500,
        Self::AnswerLost,
        Self::Swallowed,
    ];

    /// What the proxy does to the request.
    pub fn effect(self) -> Effect {
        match self {
            Self::KilledBefore | Self::Swallowed => Effect::BlackHole,
            Self::KilledAfter => Effect::HoldAnswer,
            Self::Terminated | Self::LeaseTaken => Effect::Hold,
            Self::AnsweredWith500 => Effect::CommitThenAnswer(Answer::failure(500, "InternalError")),
            Self::AnswerLost => Effect::CommitThenClose,
        }
    }

    /// Does the rest, now that a request of this host is at the point. The host runs again afterwards.
    ///
    /// # Panics
    /// When the host does not end in order, or has an effect on its way after it has lost the Lease.
    pub async fn strike(self, point: &Point, world: &World, host: usize, request: Handle) {
        match self {
            Self::KilledBefore | Self::KilledAfter => {
                if self == Self::KilledAfter {
                    request.committed(1).await;
                }
                let mut host = world.host(host).await;
                host.kill();
                request.release();
                host.restart().await;
            }
            Self::Terminated => {
                let mut host = world.host(host).await;
                // It may have been told already, by the scenario.
                if host.runs() {
                    host.ask_to_end();
                }
                request.release();
                assert_eq!(host.end().await, Some(0), "it ends in order");
                host.restart().await;
            }
            Self::LeaseTaken => {
                take_lease(world).await;
                eventually(NOTICED, async || match world.host(host).await.metric("berth_leader", &[]).await {
                    // At its end it answers nobody any more.
                    Some(0.0) | None => Ok(()),
                    Some(_) => Err("it still leads"),
                })
                .await;
                // Only the election goes on, which is how the Lease is won back.
                if !point.name.starts_with("lease ") {
                    let fenced = async || if request.holding() == 0 { Ok(()) } else { Err("the effect is still on its way") };
                    eventually(NOTICED, fenced).await;
                }
                request.release();
            }
            Self::AnsweredWith500 | Self::AnswerLost | Self::Swallowed => {}
        }
    }
}

/// Of somebody who does not renew it.
async fn take_lease(world: &World) {
    let cluster = &world.stage.cluster;
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "berth", "namespace": cluster.system()},
        "spec": {"holderIdentity": "somebody else", "leaseDurationSeconds": 1, "leaseTransitions": 99},
    });
    let leases = Resource::LEASE.api(cluster.client(), Some(cluster.system()));
    leases.patch("berth", &PatchParams::apply("test").force(), &Patch::Apply(lease)).await.expect("the administrator may");
}
