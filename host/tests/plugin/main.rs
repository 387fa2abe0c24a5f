//! The plugin runtime on real components: built by `make guests`, compiled in the real child.
#![allow(missing_docs, reason = "tests")]

mod bench;

mod compile;
mod gates;
mod http;
mod isolation;
mod limits;
mod outcome;
mod reads;
