//! The election as a pure state machine: what is known of the Lease, and what to do about it now.

use jiff::Timestamp;

use super::{Settings, record::Record};
use crate::{fence::BootTime, object};

#[derive(Debug)]
pub(super) struct Election {
    settings: Settings,
    known: Known,
    /// Since when we hold it: the time *before* the last successful write was sent.
    renewed: Option<BootTime>,
    /// No request before this, after one that did not succeed.
    not_before: Option<BootTime>,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one")]
enum Known {
    Nothing,
    /// There is no Lease as of this resourceVersion, if one was told.
    Absent(Option<String>),
    /// The last state seen, and when the first state of the same content was.
    Present {
        record: Record,
        since: BootTime,
    },
}

/// What to do now.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// Nothing until then, unless something is learnt.
    Wait(BootTime),
    Read,
    Create(Record),
    Replace(Record),
}

/// What becomes of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// A new term, until then.
    Open(BootTime),
    /// The same term, until then.
    Extend(BootTime),
    Close,
}

impl Election {
    pub(super) fn new(settings: Settings) -> Self {
        Self { settings, known: Known::Nothing, renewed: None, not_before: None }
    }

    /// What to do now. `wall` goes into the Lease for people to read.
    pub(super) fn decide(&self, now: BootTime, wall: Timestamp) -> Action {
        if let Some(not_before) = self.not_before.filter(|not_before| now < *not_before) {
            return Action::Wait(self.lapses().map_or(not_before, |lapses| lapses.min(not_before)));
        }
        match &self.known {
            Known::Nothing => Action::Read,
            Known::Absent(_) => Action::Create(Record::first(&self.settings, wall)),
            Known::Present { record, since } => {
                let due = match (self.renewed, record.holder()) {
                    (Some(renewed), _) => renewed + self.settings.retry,
                    (None, Some(other)) if other != self.settings.identity => *since + record.duration().unwrap_or(self.settings.duration),
                    (None, _) => now,
                };
                if now < due { Action::Wait(due) } else { Action::Replace(record.held_by(&self.settings, wall)) }
            }
        }
    }

    /// When leadership is given up if no renewal succeeds; none if we do not lead.
    pub(super) fn lapses(&self) -> Option<BootTime> {
        Some(self.renewed? + self.settings.renew_deadline)
    }

    /// Gives up leadership if it is time. The Lease may still be ours: then it is taken again, for a new term, as soon as that works.
    pub(super) fn lapse(&mut self, now: BootTime) -> Option<Move> {
        if self.lapses()? <= now { self.lose() } else { None }
    }

    /// A state of the Lease was seen, by reading or watching.
    pub(super) fn observe(&mut self, found: Record, now: BootTime) -> Option<Move> {
        let since = match &self.known {
            Known::Present { record, .. } if !found.newer_than(record.version()) => return None,
            Known::Absent(Some(version)) if !found.newer_than(version) => return None,
            Known::Present { record, since } if found.unchanged_since(record) => *since,
            _ => now,
        };
        let ours = found.holder() == Some(&self.settings.identity);
        self.known = Known::Present { record: found, since };
        if ours { None } else { self.lose() }
    }

    /// There is no Lease; the resourceVersion is that of its deletion where one was told.
    pub(super) fn observe_absence(&mut self, version: Option<String>) -> Option<Move> {
        if let (Known::Present { record, .. }, Some(version)) = (&self.known, &version)
            && !object::newer(version, record.version())
        {
            return None;
        }
        self.known = Known::Absent(version);
        self.lose()
    }

    /// Our write succeeded; it was sent then.
    pub(super) fn wrote(&mut self, answer: Record, sent: BootTime, now: BootTime) -> Option<Move> {
        self.not_before = None;
        let overtaken = match &self.known {
            Known::Present { record, .. } => record.newer_than(answer.version()) && record.holder() != Some(&self.settings.identity),
            Known::Absent(Some(version)) => !answer.newer_than(version),
            Known::Nothing | Known::Absent(None) => false,
        };
        if overtaken {
            return self.lose();
        }
        if !matches!(&self.known, Known::Present { record, .. } if record.newer_than(answer.version())) {
            self.known = Known::Present { record: answer, since: now };
        }
        let deadline = sent + self.settings.duration.saturating_sub(self.settings.margin);
        Some(if self.renewed.replace(sent).is_some() { Move::Extend(deadline) } else { Move::Open(deadline) })
    }

    /// Our write was refused, because the Lease is no longer as we know it.
    pub(super) fn refused(&mut self, now: BootTime) -> Option<Move> {
        self.known = Known::Nothing;
        self.failed(now);
        self.lose()
    }

    /// A request had no useful answer.
    pub(super) fn failed(&mut self, now: BootTime) {
        self.not_before = Some(now + self.settings.retry);
    }

    /// Whether we lead.
    pub(super) fn leads(&self) -> bool {
        self.renewed.is_some()
    }

    /// The last state seen, unless there is doubt about it.
    pub(super) fn record(&self) -> Option<&Record> {
        match &self.known {
            Known::Present { record, .. } => Some(record),
            Known::Nothing | Known::Absent(_) => None,
        }
    }

    fn lose(&mut self) -> Option<Move> {
        self.renewed.take().map(|_| Move::Close)
    }
}
