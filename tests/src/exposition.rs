//! What a host answers at `/metrics`.

/// The text of the Prometheus format.
#[derive(Clone, Debug)]
pub struct Exposition(pub String);

impl Exposition {
    /// The value of the first series of a metric whose labels contain these.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let is_it = |line: &&str| {
            let (series, _) = line.split_once(' ').unwrap_or((line, ""));
            series.split('{').next() == Some(name) && labels.iter().all(|(key, value)| series.contains(&format!("{key}=\"{value}\"")))
        };
        self.0.lines().find(is_it)?.rsplit_once(' ')?.1.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_name_and_some_of_its_labels() {
        let text = Exposition("# TYPE a gauge\nab 1\na{x=\"1\",y=\"2\"} 3\na{x=\"2\",y=\"2\"} 4.5\nb 5\n".to_owned());
        assert_eq!(text.value("a", &[("y", "2"), ("x", "2")]), Some(4.5));
        assert_eq!((text.value("b", &[]), text.value("c", &[]), text.value("a", &[("x", "3")])), (Some(5.0), None, None));
    }
}
