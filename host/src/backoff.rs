//! How long to wait after a failure: doubling from a base to a cap, with a little jitter.

use std::time::Duration;

/// At most this share is added, so that objects that failed together do not come back together.
const JITTER: f64 = 0.1;

/// The delay after the `failures`th failure in a row (from 1). `random` in `0.0..1.0` chooses the jitter, which is added after the cap.
pub fn delay(base: Duration, max: Duration, failures: u32, random: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(31);
    let plain = base.saturating_mul(1 << doublings).min(max);
    plain.saturating_add(plain.mul_f64(JITTER * random.clamp(0.0, 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const CAP: Duration = Duration::from_secs(300);

    #[test]
    fn doubles_from_the_base_to_the_cap() {
        let plain: Vec<u64> = (1..=11).map(|failures| delay(SECOND, CAP, failures, 0.0).as_secs()).collect();
        assert_eq!(plain, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(delay(SECOND, CAP, u32::MAX, 0.0), CAP);
    }

    #[test]
    fn jitter_adds_a_tenth_at_most_and_never_shortens() {
        assert_eq!(delay(SECOND, CAP, 3, 1.0), Duration::from_millis(4400));
        assert_eq!(delay(SECOND, CAP, 30, 0.5), Duration::from_secs(315));
    }

    #[test]
    fn absurd_settings_saturate() {
        assert_eq!(delay(Duration::MAX, CAP, 9, 0.0), CAP);
        assert_eq!(delay(Duration::ZERO, CAP, 9, 1.0), Duration::ZERO);
        assert_eq!(delay(CAP, SECOND, 1, 0.0), SECOND);
    }
}
