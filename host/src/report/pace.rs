//! How often a `Plugin` object is written: what is for people need not be there at once, and hosts that see a plugin otherwise must not
//! correct each other without end.

use std::time::Duration;

use tokio::time::Instant;

use super::{Condition, Status};

/// The shortest time between two writes of the figures of one plugin, or of what was written before and somebody has changed: a write
/// costs the API server some milliseconds.
const PACE: Duration = Duration::from_secs(10);

/// When a plugin's object was written last.
#[derive(Debug, Default)]
pub struct Paced {
    figures: Option<Instant>,
    status: Option<(Instant, Status)>,
}

impl Paced {
    /// Whether figures may be written now; then they count as written.
    pub fn figures(&mut self) -> bool {
        let due = self.figures.is_none_or(|at| at.elapsed() >= PACE);
        if due {
            self.figures = Some(Instant::now());
        }
        due
    }

    /// Whether this status may be written now: it is another one than was written last, or that was some time ago.
    pub fn may_say(&self, status: &Status) -> bool {
        self.status.as_ref().is_none_or(|(at, said)| at.elapsed() >= PACE || *said != without_times(status))
    }

    /// It was written.
    pub fn said(&mut self, status: &Status) {
        self.status = Some((Instant::now(), without_times(status)));
    }
}

/// Whoever changes a condition changes its time, which says nothing of the plugin.
fn without_times(status: &Status) -> Status {
    let timeless = |condition: &Condition| Condition { last_transition_time: String::new(), ..condition.clone() };
    Status { conditions: status.conditions.iter().map(timeless).collect(), ..status.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn figures_are_written_at_a_pace() {
        let mut paced = Paced::default();
        assert!(paced.figures() && !paced.figures());
        tokio::time::advance(PACE).await;
        assert!(paced.figures());
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_that_somebody_else_undoes_is_written_again_at_a_pace_and_another_one_at_once() {
        let status = |ready: &str, time: &str| {
            let condition =
                Condition { r#type: "Ready".into(), status: ready.into(), last_transition_time: time.into(), ..Condition::default() };
            Status { conditions: vec![condition], ..Status::default() }
        };
        let mut paced = Paced::default();
        assert!(paced.may_say(&status("True", "1")));
        paced.said(&status("True", "1"));
        assert!(!paced.may_say(&status("True", "2")) && paced.may_say(&status("False", "2")));
        tokio::time::advance(PACE).await;
        assert!(paced.may_say(&status("True", "2")));
    }
}
