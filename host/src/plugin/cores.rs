//! The cores that guests may compute on: threads of low priority, and a line of those that want one.
//!
//! # Guarantees
//! - At most one core less than there are computes for guests that go on computing, or the only one.
//! - The host's own threads go first where there are not cores enough: what a guest computes costs the objects of others little time.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError, mpsc},
    thread,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Nice value of the threads: the kernel gives the host's own about nine times as much where both have work.
const NICE: i32 = 10;

type Job = Box<dyn FnOnce() + Send>;

/// Those of the machine. Clones are the same.
#[derive(Clone, Debug)]
pub struct Cores {
    count: usize,
    line: Arc<Semaphore>,
    threads: Arc<OnceLock<Option<mpsc::Sender<Job>>>>,
}

impl Cores {
    /// All but one.
    pub fn of_machine() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self::new(cores.saturating_sub(1).max(1))
    }

    pub(super) fn new(count: usize) -> Self {
        Self { count, line: Arc::new(Semaphore::new(count)), threads: Arc::default() }
    }

    /// Waits for a core behind all who waited before. It is free again when what this returns is dropped.
    pub async fn turn(self) -> OwnedSemaphorePermit {
        self.line.acquire_owned().await.expect("the line is never closed")
    }

    /// Does the job on one of the threads, which are started with the first one. To be called by who has a core.
    pub fn run(&self, job: Job) {
        let rest = match self.threads.get_or_init(|| start(self.count)) {
            Some(threads) => threads.send(job).err().map(|error| error.0),
            None => Some(job),
        };
        // Where there can be no thread, on this one.
        if let Some(job) = rest {
            job();
        }
    }
}

fn start(count: usize) -> Option<mpsc::Sender<Job>> {
    let (jobs, taken) = mpsc::channel::<Job>();
    let taken = Arc::new(Mutex::new(taken));
    for _ in 0..count {
        let taken = taken.clone();
        let work = move || {
            // For this thread alone: on Linux the priority is that of a thread. Who may not set it has the usual one.
            let _ = rustix::process::setpriority_process(None, NICE);
            loop {
                let next = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(job) = next else { return };
                job();
            }
        };
        if let Err(error) = thread::Builder::new().name("guest".into()).spawn(work) {
            tracing::warn!(%error, "no thread for guests that compute; they do so on the host's own");
            return None;
        }
    }
    Some(jobs)
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn jobs_are_done_by_threads_of_low_priority_and_the_hosts_own_keep_theirs() {
        let own = getpriority_process(None).expect("it has one");
        let cores = Cores::new(2);
        for _ in 0..3 {
            let (tell, told) = tokio::sync::oneshot::channel();
            cores.run(Box::new(move || {
                tell.send((thread::current().name().map(str::to_owned), getpriority_process(None))).expect("awaited")
            }));
            let (name, priority) = told.await.expect("done");
            assert_eq!((name.as_deref(), priority), (Some("guest"), Ok(NICE)));
        }
        assert_eq!(getpriority_process(None), Ok(own));
    }
}
