//! The machine code of one component: mapped while it runs, and given back while it does not.
//!
//! A component that is linked takes some hundred KiB beside its code, which a hundred plugins that have nothing to do would hold for
//! nothing. It is mapped again in a millisecond or two, from a file that stays open whatever becomes of the cache meanwhile.
//!
//! A start maps every component once to have it described. Those are not all kept until the first run: what a hundred of them have
//! allocated would lie between what stays, and hardly a page of it could be given back.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use anyhow::Result;
use tokio::time::Instant;

use crate::memory;

/// What has not run for so long is given back. Against a run that often, mapping it again is nothing.
const IDLE: Duration = Duration::from_secs(10);
/// What has been described and has not run is given back as soon as so many others have been described since.
const UNTRIED: usize = 8;
/// How often it is looked for what is idle.
const LOOK: Duration = Duration::from_secs(5);

/// Maps and links a component. It takes too long for a worker of tokio.
type Load<T> = Arc<dyn Fn() -> Result<T> + Send + Sync>;

/// See the module. `T` is a linked component, cheap to clone.
pub struct Code<T> {
    load: Load<T>,
    warm: tokio::sync::Mutex<Option<Warm<T>>>,
}

struct Warm<T> {
    linked: T,
    used: Instant,
    ran: bool,
}

impl<T: Clone + Send + 'static> Code<T> {
    /// The component for a run, mapped if it is not.
    ///
    /// # Errors
    /// Those of mapping and linking.
    pub async fn get(&self) -> Result<T> {
        self.mapped(true).await
    }

    async fn mapped(&self, runs: bool) -> Result<T> {
        let mut warm = self.warm.lock().await;
        if let Some(warm) = &mut *warm {
            warm.used = Instant::now();
            warm.ran |= runs;
            return Ok(warm.linked.clone());
        }
        let load = self.load.clone();
        let linked = tokio::task::spawn_blocking(move || load()).await??;
        *warm = Some(Warm { linked: linked.clone(), used: Instant::now(), ran: runs });
        Ok(linked)
    }

    /// Gives back what is mapped, if it is like that; whether it was. What is being mapped is about to be used.
    fn rest_if(&self, due: impl Fn(&Warm<T>) -> bool) -> bool {
        self.warm.try_lock().is_ok_and(|mut warm| warm.take_if(|warm| due(warm)).is_some())
    }

    fn is_untried(&self) -> bool {
        self.warm.try_lock().is_ok_and(|warm| warm.as_ref().is_some_and(|warm| !warm.ran))
    }
}

/// All code of a process.
pub struct Codes<T>(Arc<Mutex<Vec<Weak<Code<T>>>>>);

impl<T: Clone + Send + 'static> Codes<T> {
    /// None yet. What does not run is given back for as long as this lives.
    pub fn new() -> Self {
        let all = Arc::<Mutex<Vec<Weak<Code<T>>>>>::default();
        let known = Arc::downgrade(&all);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(all) = known.upgrade() else { return };
                let codes = all.lock().expect("no panic while the lock is held").clone();
                if codes.iter().filter_map(Weak::upgrade).filter(|code| code.rest_if(|warm| warm.used.elapsed() >= IDLE)).count() > 0 {
                    memory::burst();
                }
            }
        });
        Self(all)
    }

    /// The component, mapped if it is not, to have it described: it may never run.
    ///
    /// # Errors
    /// Those of mapping and linking.
    pub async fn look(&self, code: &Code<T>) -> Result<T> {
        let linked = code.mapped(false).await?;
        let all = self.0.lock().expect("no panic while the lock is held").clone();
        // The last of those that came to the host, which are most likely the last that were looked at.
        let untried: Vec<_> = all.iter().filter_map(Weak::upgrade).filter(|code| code.is_untried()).collect();
        for code in untried.iter().rev().skip(UNTRIED) {
            code.rest_if(|warm| !warm.ran);
        }
        Ok(linked)
    }

    /// The code of one more component.
    pub fn add(&self, load: impl Fn() -> Result<T> + Send + Sync + 'static) -> Arc<Code<T>> {
        let code = Arc::new(Code { load: Arc::new(load), warm: tokio::sync::Mutex::default() });
        let mut all = self.0.lock().expect("no panic while the lock is held");
        all.retain(|code| code.strong_count() > 0);
        all.push(Arc::downgrade(&code));
        code
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Code that counts how often it was mapped, and fails while it is told to.
    fn counting(codes: &Codes<u32>, fails: u32) -> Arc<Code<u32>> {
        let times = AtomicU32::new(0);
        codes.add(move || {
            let time = times.fetch_add(1, Ordering::Relaxed) + 1;
            anyhow::ensure!(time > fails, "no room");
            Ok(time)
        })
    }

    #[tokio::test(start_paused = true)]
    async fn what_runs_stays_mapped_and_what_rests_is_mapped_again_when_it_is_needed() {
        let codes = Codes::new();
        let (busy, idle) = (counting(&codes, 0), counting(&codes, 0));
        assert_eq!(idle.get().await.expect("mapped"), 1);
        for _ in 0..10 {
            assert_eq!(busy.get().await.expect("mapped"), 1);
            tokio::time::sleep(IDLE / 3).await;
        }
        assert!(idle.warm.lock().await.is_none(), "it holds nothing while it rests");
        assert_eq!(idle.get().await.expect("mapped"), 2);
        drop(busy);
        drop(counting(&codes, 0));
        assert_eq!(codes.0.lock().expect("no panic").len(), 2, "the one that is gone makes room for the next");
    }

    #[tokio::test]
    async fn of_what_was_only_looked_at_the_last_few_stay_mapped() {
        let codes = Codes::new();
        let all: Vec<_> = (0..UNTRIED + 3).map(|_| counting(&codes, 0)).collect();
        all[0].get().await.expect("mapped for a run");
        for code in &all {
            codes.look(code).await.expect("mapped");
        }
        let mapped: Vec<bool> = all.iter().map(|code| code.warm.try_lock().expect("free").is_some()).collect();
        let expected: Vec<bool> = (0..UNTRIED + 3).map(|number| number == 0 || number >= 3).collect();
        assert_eq!(mapped, expected);
        assert_eq!(all[1].get().await.expect("mapped again"), 2);
    }

    #[tokio::test]
    async fn code_that_cannot_be_mapped_is_tried_again_at_the_next_run() {
        let codes = Codes::new();
        let code = counting(&codes, 1);
        assert_eq!(code.get().await.expect_err("the first time").to_string(), "no room");
        assert_eq!(code.get().await.expect("the second time"), 2);
    }
}
