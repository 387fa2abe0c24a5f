//! A reading of the cluster that is kept for a while, so that a rotation takes effect and yet not every request asks.

use std::time::Duration;

use tokio::{sync::Mutex, time::Instant};

use crate::{package::quantity::show_duration, secrets::ReadError};

/// How long a reading holds: a rotated Secret or CA is used after this at the latest.
pub const FRESH: Duration = Duration::from_secs(30);

/// How long a reading may go on in place of one that got no answer. Without an API server that answers, a Lease ends within seconds; an
/// answer that is no answer, such as an error of an aggregated server or of a webhook, may come for ever.
const OLDEST: Duration = Duration::from_secs(300);

/// How soon what could not be read is read again.
const RETRY: Duration = Duration::from_secs(3);

/// The least time between two readings, or one failing object would ask for each of its requests.
const PAUSE: Duration = Duration::from_secs(1);

/// One thing, read by whoever needs it first.
#[derive(Debug)]
pub struct Kept<T> {
    reading: Mutex<Option<Reading<T>>>,
}

#[derive(Debug)]
struct Reading<T> {
    at: Instant,
    /// When it was last known to be so.
    known: Instant,
    result: Result<T, ReadError>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self { reading: Mutex::new(None) }
    }
}

impl<T: Clone> Kept<T> {
    /// What was read, or is read now. `read` is given what there was before.
    pub async fn get(&self, read: impl AsyncFnOnce(Option<&T>) -> Result<T, ReadError>) -> Result<T, ReadError> {
        let holds = |reading: &Reading<T>| reading.at.elapsed() < if reading.result.is_ok() { FRESH } else { RETRY };
        self.unless(holds, read).await
    }

    /// What is read now, or was after this time, when the reading before it proved wrong. Waits where the last one is very young.
    pub async fn since(&self, time: Instant, read: impl AsyncFnOnce(Option<&T>) -> Result<T, ReadError>) -> Result<T, ReadError> {
        let last = self.reading.lock().await.as_ref().map(|reading| reading.at);
        // Without the lock: nobody else has to wait for it.
        tokio::time::sleep_until(last.map_or(time, |last| last + PAUSE)).await;
        self.unless(|reading| reading.at > time, read).await
    }

    async fn unless(
        &self,
        holds: impl FnOnce(&Reading<T>) -> bool,
        read: impl AsyncFnOnce(Option<&T>) -> Result<T, ReadError>,
    ) -> Result<T, ReadError> {
        let mut reading = self.reading.lock().await;
        if let Some(reading) = reading.as_ref().filter(|reading| holds(reading)) {
            return reading.result.clone();
        }
        let before = reading.as_ref().and_then(|reading| Some((reading.result.as_ref().ok()?, reading.known)));
        let result = read(before.map(|(value, _)| value)).await;
        let now = Instant::now();
        let (known, result) = match (result, before) {
            // An API server that is away takes nothing back.
            (Err(ReadError::Away(_)), Some((before, known))) if known.elapsed() < OLDEST => (known, Ok(before.clone())),
            (Err(ReadError::Away(cause)), Some(_)) => {
                (now, Err(ReadError::Away(format!("the API server has not confirmed it for {}: {cause}", show_duration(OLDEST)))))
            }
            (result, _) => (now, result),
        };
        *reading = Some(Reading { at: now, known, result: result.clone() });
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reading_is_kept_for_a_while_and_a_refusal_for_less() {
        let kept = Kept::default();
        let read = async |value: Result<u32, ReadError>| kept.get(async |_| value).await;
        assert_eq!(read(Ok(1)).await, Ok(1));
        tokio::time::advance(FRESH - RETRY).await;
        assert_eq!(read(Ok(2)).await, Ok(1));
        tokio::time::advance(RETRY).await;
        assert_eq!(read(Ok(3)).await, Ok(3));
        tokio::time::advance(FRESH).await;
        let gone = ReadError::Refused("gone".into());
        assert_eq!(read(Err(gone.clone())).await, Err(gone.clone()), "a deleted Secret is not used any longer");
        assert_eq!(read(Ok(4)).await, Err(gone));
        tokio::time::advance(RETRY).await;
        assert_eq!(read(Ok(5)).await, Ok(5));
    }

    #[tokio::test(start_paused = true)]
    async fn no_answer_changes_nothing() {
        let kept = Kept::default();
        let away = || ReadError::Away("no answer".into());
        assert_eq!(kept.get(async |_| Err::<u32, _>(away())).await, Err(away()));
        tokio::time::advance(RETRY).await;
        assert_eq!(kept.get(async |_| Ok(1)).await, Ok(1));
        tokio::time::advance(FRESH).await;
        assert_eq!(kept.get(async |_| Err(away())).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_confirms_any_more_is_given_up_after_a_while() {
        let kept = Kept::default();
        let read = async |answer: Result<u32, ReadError>| kept.get(async |_| answer).await;
        let away = || Err(ReadError::Away("500 Internal Server Error".into()));
        assert_eq!(read(Ok(1)).await, Ok(1));
        for _ in 0..OLDEST.as_secs() / FRESH.as_secs() - 1 {
            tokio::time::advance(FRESH).await;
            assert_eq!(read(away()).await, Ok(1));
        }
        tokio::time::advance(FRESH).await;
        let sentence = read(away()).await.expect_err("too old").to_string();
        assert_eq!(sentence, "the API server has not confirmed it for 5m: 500 Internal Server Error");
        tokio::time::advance(RETRY).await;
        assert_eq!(read(Ok(2)).await, Ok(2));
    }

    #[tokio::test(start_paused = true)]
    async fn what_proved_wrong_is_read_again_once_a_second_for_all_who_ask() {
        let kept = Kept::default();
        let began = Instant::now();
        assert_eq!(kept.get(async |_| Ok(1)).await, Ok(1));
        let wrong = Instant::now();
        let again = || kept.since(wrong, async |before: Option<&u32>| Ok(before.copied().unwrap_or_default() + 1));
        assert_eq!(tokio::join!(again(), again(), again()), (Ok(2), Ok(2), Ok(2)));
        assert_eq!(began.elapsed(), PAUSE);
        assert_eq!(again().await, Ok(2), "read since then");
        assert_eq!(kept.get(async |_| Ok(7)).await, Ok(2));
    }
}
