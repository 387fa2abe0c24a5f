//! Fault exploration: a scenario is run once without a fault to count its effects, and then once for each effect and each fault at it;
//! every run has to come to the same end.
//!
//! # Expected flow
//! [`explore`] runs a [`Scenario`] cleanly. Every write of a host and every request to a back end is a [`Point`]; a point and a [`Fault`]
//! make a [`Strike`]. In each further run one strike happens, the host is started again or a standby takes over, and the [`state`] at the
//! end is compared with that of the clean run. The [laws](crate::laws) are held to at the end of each.
//!
//! # Guarantees
//! A fault happens at its point: the request is held there until it is done, without sleeps. A point that a run does not come to is
//! reported as not reached, and is no success.
//!
//! # Caveats
//! Points are found again by their name and their number among those of that name, as other effects come earlier or later in each run.

use std::{
    cell::Cell,
    fmt,
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use futures::{FutureExt, StreamExt, stream};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

pub mod fault;
pub mod point;
pub mod scenario;
pub mod state;
pub mod world;

pub use fault::Fault;
pub use point::Point;
pub use scenario::Scenario;
use state::{difference, state};
use world::{PATIENCE, World};

use crate::eventually::eventually;

/// How many runs there are at once, of all scenarios together: they wait more than they compute.
const AT_ONCE: usize = 4;
static TURNS: Semaphore = Semaphore::const_new(AT_ONCE);
/// How long all may be quiet before another end is the end: a write of a kept ConfigMap that is never answered is given up after 10 s,
/// and done again 10 s later.
const STILL: Duration = Duration::from_secs(40);
/// What is explored: `all`, or strikes whose text contains this.
const EXTENT: &str = "BERTH_FAULTS";

/// A fault at a point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strike {
    /// Where.
    pub point: Point,
    /// What.
    pub fault: Fault,
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.fault, self.point)
    }
}

/// Which strikes are tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// So many of each scenario, spread over its points and all faults; the same ones each time.
    Some(usize),
    /// Every fault at every point.
    All,
    /// Those whose text contains this.
    Like(String),
}

impl Extent {
    /// What the environment asks for, or else so many.
    pub fn or(count: usize) -> Self {
        match std::env::var(EXTENT) {
            Ok(all) if all == "all" => Self::All,
            Ok(like) if !like.is_empty() => Self::Like(like),
            _ => Self::Some(count),
        }
    }

    /// The strikes of a scenario with these points.
    pub fn strikes(&self, points: &[Point]) -> Vec<Strike> {
        let strike = |point: &Point, fault| Strike { point: point.clone(), fault };
        let all = points.iter().flat_map(|point| Fault::ALL.map(|fault| strike(point, fault)));
        match self {
            Self::All => all.collect(),
            Self::Like(text) => all.filter(|strike| strike.to_string().contains(text)).collect(),
            Self::Some(count) => {
                let mut left = points.to_vec();
                let faults = Fault::ALL.iter().cycle().take((*count).min(points.len()));
                faults.map(|fault| draw(&mut left, *fault)).collect()
            }
        }
    }
}

/// One of the points that are left, for this fault: by lot, and the lot stays with the point when others come or go.
fn draw(left: &mut Vec<Point>, fault: Fault) -> Strike {
    let lot = |point: &Point| Sha256::digest(Strike { point: point.clone(), fault }.to_string());
    let (at, _) = left.iter().enumerate().min_by_key(|(_, point)| lot(point)).expect("no more are drawn than there are");
    Strike { point: left.swap_remove(at), fault }
}

/// What came of the exploration of a scenario.
#[derive(Debug, Default)]
pub struct Report {
    /// How many points there are.
    pub points: usize,
    /// How many strikes were to be tried.
    pub strikes: usize,
    /// The strikes that happened, with the same end as without them.
    pub passed: usize,
    /// Those whose point was not reached.
    pub not_reached: Vec<String>,
    /// Those with another end, and what was another.
    pub failed: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { points, strikes: _, passed, not_reached, failed } = self;
        write!(f, "{points} points; {} faults tried, {} of them with another end", passed + failed.len(), failed.len())?;
        if !not_reached.is_empty() {
            write!(f, "; {} not reached: {}", not_reached.len(), not_reached.join(", "))?;
        }
        failed.iter().try_for_each(|failure| write!(f, "\n{failure}"))
    }
}

/// How a run ended.
struct Ran {
    points: Vec<Point>,
    end: Value,
    struck: bool,
}

/// Explores a scenario.
///
/// # Panics
/// When the clean run fails.
pub async fn explore(scenario: &Scenario, extent: &Extent) -> Report {
    let clean = attempt(scenario, "clean", None).await.unwrap_or_else(|why| panic!("{} without a fault: {why}", scenario.name));
    let strikes = extent.strikes(&clean.points);
    let runs = strikes.iter().enumerate().map(|(number, strike)| {
        let end = &clean.end;
        async move { (strike, attempt(scenario, &number.to_string(), Some((strike, end))).await) }
    });
    let mut runs = stream::iter(runs).buffer_unordered(AT_ONCE);
    let mut report = Report { points: clean.points.len(), strikes: strikes.len(), ..Report::default() };
    while let Some((strike, ran)) = runs.next().await {
        match ran {
            Ok(Ran { struck: true, .. }) => report.passed += 1,
            Ok(Ran { struck: false, .. }) => report.not_reached.push(strike.to_string()),
            Err(why) => report.failed.push(format!("{}: {strike}: {why}", scenario.name)),
        }
    }
    report
}

/// One run, whose panics are told.
async fn attempt(scenario: &Scenario, name: &str, strike: Option<(&Strike, &Value)>) -> Result<Ran, String> {
    let _turn = TURNS.acquire().await.expect("nobody closes it");
    let started = Instant::now();
    let namespace = format!("{}-{name}", scenario.name);
    let ran = AssertUnwindSafe(run(scenario, &namespace, strike)).catch_unwind().await.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        text.unwrap_or_else(|| "it panicked".to_owned())
    });
    let what = strike.map_or_else(|| "without a fault".to_owned(), |(strike, _)| strike.to_string());
    let how = match &ran {
        Ok(Ran { struck: false, .. }) if strike.is_some() => "not reached",
        Ok(_) => "ok",
        Err(_) => "FAILED",
    };
    eprintln!("{:>5.1} s  {}: {what}: {how}", started.elapsed().as_secs_f32(), scenario.name);
    ran
}

/// Where a fault stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Awaited,
    Happening,
    Over,
}

async fn run(scenario: &Scenario, name: &str, strike: Option<(&Strike, &Value)>) -> Ran {
    let mut world = World::new(name, scenario.replicas).await.expect("a world");
    (scenario.prepare)(&world).await;
    if let Some((strike, _)) = strike {
        world.arm(strike);
    }
    let struck = world.struck();
    world.launch().expect("the hosts start");
    let (world, progress) = (&world, Cell::new(Progress::Awaited));
    let striking = async {
        let (host, request) = struck.await;
        progress.set(Progress::Happening);
        let host = match host {
            Some(host) => host,
            // A back end is not told by whom it is called.
            None => world.leader().await.unwrap_or_default(),
        };
        let Strike { point, fault } = strike.expect("there is a rule").0;
        fault.strike(point, world, host, request).await;
        progress.set(Progress::Over);
        std::future::pending::<()>().await;
    };
    let course = async {
        (scenario.script)(world).await;
        until_end(scenario, world, &progress, strike.map(|(_, expected)| expected)).await
    };
    let end = tokio::select! {
        end = course => end,
        () = striking => unreachable!("it waits for ever in the end"),
    };
    Ran { points: world.points().await, end, struck: progress.get() == Progress::Over }
}

/// Waits until all is quiet, and the end is as it is expected.
async fn until_end(scenario: &Scenario, world: &World, progress: &Cell<Progress>, expected: Option<&Value>) -> Value {
    let mut quiet: Option<Instant> = None;
    eventually(PATIENCE, async || {
        if progress.get() == Progress::Happening {
            return Err("the fault is not over".to_owned());
        }
        let mut end = state(world).await.map_err(|error| format!("{error:#}"))?;
        (scenario.forget)(&mut end);
        let other = expected.map(|expected| difference(expected, &end)).filter(|lines| !lines.is_empty());
        match (world.quiet().await, other) {
            (Ok(()), None) => Ok(end),
            (Ok(()), Some(other)) => {
                let since = quiet.get_or_insert_with(Instant::now).elapsed();
                assert!(since < STILL, "another end:\n{other}");
                Err(other)
            }
            (Err(busy), other) => {
                quiet = None;
                Err(other.unwrap_or(busy))
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(name: &str) -> Point {
        Point { name: name.to_owned(), nth: 1 }
    }

    #[test]
    fn a_selection_has_each_fault_at_another_point_and_hardly_changes_with_the_points() {
        let mut points: Vec<Point> = (0..20).map(|number| point(&format!("p{number:02}"))).collect();
        let strikes = Extent::Some(7).strikes(&points);
        let faults: Vec<Fault> = strikes.iter().map(|strike| strike.fault).collect();
        assert_eq!(faults, Fault::ALL);
        let mut chosen: Vec<&Point> = strikes.iter().map(|strike| &strike.point).collect();
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 7);
        let unused = points.iter().position(|point| !chosen.contains(&point)).expect("some");
        points.remove(unused);
        assert_eq!(Extent::Some(7).strikes(&points), strikes);
        assert_eq!(Extent::Some(50).strikes(&points).len(), 19);
        assert_eq!(Extent::All.strikes(&points).len(), 19 * 7);
        assert_eq!(Extent::Like(format!("right after {}", points[0])).strikes(&points).len(), 1);
        assert!(Extent::Some(3).strikes(&[]).is_empty());
    }

    #[test]
    fn a_report_tells_what_was_not_reached_and_what_failed() {
        let report = Report { points: 3, strikes: 4, passed: 2, not_reached: vec!["x".into()], failed: vec!["email: y: z".into()] };
        assert_eq!(report.to_string(), "3 points; 3 faults tried, 1 of them with another end; 1 not reached: x\nemail: y: z");
    }
}
