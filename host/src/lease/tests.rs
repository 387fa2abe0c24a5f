//! Tests of the leader election: its rules one by one, and whole electors against an API server in memory.

mod api;
mod electors;
mod rules;

use super::*;
