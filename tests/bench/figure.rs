//! A figure: what was measured on both sides of one run, what is aimed at, and whether it was met.

use std::{collections::BTreeMap, fmt, path::Path};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::system::System;

/// A figure as it is written to `results.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// The part that it belongs to, such as `P1`.
    pub id: String,
    /// What was measured.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// Of Berth.
    pub ours: Spread,
    /// Of the peers by their names, those that do the same.
    pub peers: BTreeMap<String, Spread>,
    /// What is aimed at, in words.
    pub aim: String,
    /// Whether every aim is met; none where nothing is aimed at.
    pub met: Option<bool>,
}

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The one in the middle.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The greatest.
    pub high: f64,
    /// How many there are.
    pub runs: usize,
}

/// What a figure of ours should be.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// Not more than this.
    AtMost(f64),
    /// Not more than so many times the peer's.
    BelowPeer(f64, System),
    /// Not less than so many times the peer's.
    AbovePeer(f64, System),
}

impl Spread {
    /// Of these measurements.
    pub fn of(measured: &[f64]) -> Self {
        let mut sorted = measured.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&low), Some(&high)) = (sorted.first(), sorted.last()) else { return Self::default() };
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Self { median, low, high, runs: sorted.len() }
    }
}

/// The value below which this share of the measurements is.
pub fn percentile(measured: &[f64], share: f64) -> f64 {
    let mut sorted = measured.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "an index")]
    let at = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).copied().unwrap_or_default()
}

impl Figure {
    /// From the measurements of every system.
    ///
    /// # Panics
    /// When Berth was not measured.
    pub fn new(id: &str, name: &str, unit: &str, measured: &BTreeMap<System, Vec<f64>>, aims: &[Aim]) -> Self {
        let mut spreads: BTreeMap<System, Spread> = measured.iter().map(|(system, values)| (*system, Spread::of(values))).collect();
        let ours = spreads.remove(&System::Berth).expect("Berth is measured");
        let met = (!aims.is_empty()).then(|| aims.iter().all(|aim| aim.met(ours.median, &spreads)));
        Self {
            id: id.to_owned(),
            name: name.to_owned(),
            unit: unit.to_owned(),
            ours,
            aim: aims.iter().map(|aim| aim.words(unit)).collect::<Vec<_>>().join(", "),
            met,
            peers: spreads.into_iter().map(|(system, spread)| (system.to_string(), spread)).collect(),
        }
    }

    /// One that has no peer.
    pub fn alone(id: &str, name: &str, unit: &str, measured: &[f64], aims: &[Aim]) -> Self {
        Self::new(id, name, unit, &BTreeMap::from([(System::Berth, measured.to_vec())]), aims)
    }
}

impl Aim {
    fn met(self, ours: f64, peers: &BTreeMap<System, Spread>) -> bool {
        // A peer that was not measured proves nothing.
        let times = |times: f64, peer: System| peers.get(&peer).map(|spread| spread.median * times);
        match self {
            Self::AtMost(most) => ours <= most,
            Self::BelowPeer(factor, peer) => times(factor, peer).is_some_and(|most| ours <= most),
            Self::AbovePeer(factor, peer) => times(factor, peer).is_some_and(|least| ours >= least),
        }
    }

    fn words(self, unit: &str) -> String {
        match self {
            Self::AtMost(most) => format!("≤ {} {unit}", Number(most)),
            Self::BelowPeer(times, peer) if times < 0.1 => format!("≤ 1/{:.0} of {peer}", 1.0 / times),
            Self::BelowPeer(times, peer) => format!("≤ {times}× {peer}"),
            Self::AbovePeer(times, peer) => format!("≥ {times}× {peer}"),
        }
    }
}

/// A number with three digits that matter.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.abs() {
            0.0 => f.write_str("0"),
            size if size >= 100.0 => write!(f, "{:.0}", self.0),
            size if size >= 10.0 => write!(f, "{:.1}", self.0),
            size if size >= 1.0 => write!(f, "{:.2}", self.0),
            _ => write!(f, "{:.3}", self.0),
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Number(self.median))?;
        if self.runs > 1 { write!(f, " ({}–{})", Number(self.low), Number(self.high)) } else { Ok(()) }
    }
}

/// The figures as a table of Markdown, which is also readable on a terminal.
pub fn table(figures: &[Figure]) -> String {
    let peers = [System::KubeRs, System::ControllerRuntime, System::Kopf].map(|peer| peer.to_string());
    let head = ["", "figure", "unit", "Berth"].map(str::to_owned).into_iter().chain(peers.clone());
    let mut rows: Vec<Vec<String>> = vec![head.chain(["aim".to_owned(), "met".to_owned()]).collect()];
    rows.push(vec!["---".to_owned(); rows[0].len()]);
    for figure in figures {
        let mut row = vec![figure.id.clone(), figure.name.clone(), figure.unit.clone(), figure.ours.to_string()];
        row.extend(peers.iter().map(|peer| figure.peers.get(peer).map_or_else(String::new, ToString::to_string)));
        row.push(figure.aim.clone());
        row.push(figure.met.map_or("", |met| if met { "yes" } else { "no" }).to_owned());
        rows.push(row);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(
                |(cell, width)| {
                    if cell == "---" { "-".repeat(*width) } else { format!("{cell}{}", " ".repeat(width - cell.chars().count())) }
                },
            )
            .collect();
        format!("| {} |\n", cells.join(" | "))
    };
    rows.iter().map(line).collect()
}

/// Writes figures to a file.
pub fn write(path: &Path, figures: &[Figure]) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let text = serde_json::to_string_pretty(figures).context("figures are JSON")?;
    std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}

/// Reads figures from a file.
pub fn read(path: &Path) -> anyhow::Result<Vec<Figure>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_in_the_middle_is_the_median() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, low: 1.0, high: 3.0, runs: 3 });
        assert_eq!(Spread::of(&[4.0, 1.0]).median, 2.5);
        assert_eq!(Spread::of(&[]), Spread::default());
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| percentile(&hundred, share)), [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }

    #[test]
    fn an_aim_beside_a_peer_that_was_not_measured_is_not_met() {
        let measured = BTreeMap::from([(System::Berth, vec![10.0]), (System::KubeRs, vec![9.0])]);
        let met = |aims: &[Aim]| Figure::new("P1", "rate", "1/s", &measured, aims).met;
        assert_eq!(met(&[]), None);
        assert_eq!(met(&[Aim::AtMost(10.0), Aim::AbovePeer(1.1, System::KubeRs)]), Some(true));
        assert_eq!(met(&[Aim::AbovePeer(1.2, System::KubeRs)]), Some(false));
        assert_eq!(met(&[Aim::BelowPeer(1.0, System::Kopf)]), Some(false));
    }

    #[test]
    fn the_table_lines_up() {
        let measured = BTreeMap::from([(System::Berth, vec![0.5, 0.7]), (System::Kopf, vec![123.4])]);
        let text = table(&[Figure::new("P1", "rate", "1/s", &measured, &[Aim::BelowPeer(1.0, System::Kopf)])]);
        let lengths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
        assert!(lengths.iter().all(|length| *length == lengths[0]), "{text}");
        assert!(text.contains("0.600 (0.500–0.700)") && text.contains("| 123 ") && text.contains("≤ 1× kopf | yes"), "{text}");
    }
}
