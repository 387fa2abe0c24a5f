//! The most that a host gives any plugin: flags of `berth run`, which `plugin.yaml` is held against.

use std::time::Duration;

use clap::{Args, builder::RangedU64ValueParser};

use super::{
    Config, MAX_COMPONENT, Package, Refusal, RunLimits, ceiling,
    quantity::{self, show_bytes, show_duration},
    reason,
};

/// Each is at least the default of what it bounds: a plugin that says nothing is never refused for it.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceilings {
    /// Most objects of a kind at once that `plugin.yaml` may ask for
    #[arg(long, default_value = "256", value_name = "NUMBER", value_parser = RangedU64ValueParser::<usize>::new().range(16..=ceiling::CONCURRENCY as u64))]
    pub max_concurrency: usize,
    /// Longest `timeout` of a call
    #[arg(long, default_value = "5m", value_name = "TIME", value_parser = |text: &str| time(text, 10, ceiling::TIMEOUT))]
    pub max_timeout: Duration,
    /// Most `cpu` time of a call
    #[arg(long, default_value = "1m", value_name = "TIME", value_parser = |text: &str| time(text, 2, ceiling::CPU))]
    pub max_cpu: Duration,
    /// Most `memory` of a call
    #[arg(long, default_value = "512Mi", value_name = "AMOUNT", value_parser = |text: &str| amount(text, 64 << 20, ceiling::MEMORY))]
    pub max_memory: u64,
    /// Largest component, after decompression
    #[arg(long, default_value = "16Mi", value_name = "AMOUNT", value_parser = |text: &str| amount(text, 1 << 10, MAX_COMPONENT as u64))]
    pub max_component: u64,
    /// Of `limits`.
    #[command(flatten)]
    pub max_limits: RunLimits,
}

impl Default for Ceilings {
    fn default() -> Self {
        Self {
            max_concurrency: 256,
            max_timeout: Duration::from_secs(300),
            max_cpu: Duration::from_secs(60),
            max_memory: 512 << 20,
            max_component: MAX_COMPONENT as u64,
            max_limits: RunLimits::CEILING,
        }
    }
}

impl Ceilings {
    /// As far as any host can go: for a check away from the host that decides.
    pub fn highest() -> Self {
        Self {
            max_concurrency: ceiling::CONCURRENCY,
            max_timeout: ceiling::TIMEOUT,
            max_cpu: ceiling::CPU,
            max_memory: ceiling::MEMORY,
            max_component: MAX_COMPONENT as u64,
            max_limits: RunLimits::CEILING,
        }
    }

    /// Whether a component is small enough.
    pub fn check_component(&self, package: &Package) -> Result<(), Refusal> {
        if package.component.len() as u64 <= self.max_component {
            return Ok(());
        }
        let (size, most) = (package.component.len(), show_bytes(self.max_component));
        let message =
            format!("The component of {size} bytes is larger than the {most} that this host takes (`--max-component` of berth run).");
        Err(Refusal::new(reason::TOO_LARGE, message))
    }

    /// Whether a configuration asks for no more than there is.
    pub fn check(&self, config: &Config) -> Result<(), Refusal> {
        let Self { max_concurrency, max_timeout, max_cpu, max_memory, max_component: _, max_limits } = self;
        let said = |key: &str, flag: &str, asked: &str, most: &str| {
            let message =
                format!("plugin.yaml asks for a {key:?} of {asked}, more than the {most} that this host gives (`{flag}` of berth run).");
            Err(Refusal::new(reason::INVALID_CONFIG, message))
        };
        let beyond = |key: &str, asked: String, most: String| said(key, &format!("--max-{key}"), &asked, &most);
        if let Some([key, flag, asked, most]) = config.limits.beyond(max_limits) {
            return said(&key, &flag, &asked, &most);
        }
        if config.concurrency > *max_concurrency {
            return beyond("concurrency", config.concurrency.to_string(), max_concurrency.to_string());
        }
        if config.timeout > *max_timeout {
            return beyond("timeout", show_duration(config.timeout), show_duration(*max_timeout));
        }
        if config.cpu > *max_cpu {
            return beyond("cpu", show_duration(config.cpu), show_duration(*max_cpu));
        }
        if config.memory > *max_memory {
            return beyond("memory", show_bytes(config.memory), show_bytes(*max_memory));
        }
        Ok(())
    }
}

/// A length of time of at least so many seconds.
fn time(text: &str, least: u64, most: Duration) -> Result<Duration, String> {
    let least = Duration::from_secs(least);
    let time = quantity::duration(text).filter(|time| (least..=most).contains(time));
    time.ok_or_else(|| format!("not a time from {} to {}", show_duration(least), show_duration(most)))
}

fn amount(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let amount = quantity::bytes(text).filter(|amount| (least..=most).contains(amount));
    amount.ok_or_else(|| format!("not an amount from {} to {}", show_bytes(least), show_bytes(most)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        ceilings: Ceilings,
    }

    fn flags(text: &str) -> Result<Ceilings, String> {
        let words = std::iter::once("berth").chain(text.split_whitespace());
        Flags::try_parse_from(words).map(|flags| flags.ceilings).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_defaults_hold_and_no_flag_is_below_what_a_silent_plugin_gets() {
        assert_eq!(flags(""), Ok(Ceilings::default()));
        assert_eq!(Ceilings::default().check(&Config::default()), Ok(()));
        for text in [
            "--max-memory 63Mi",
            "--max-memory 5Gi",
            "--max-timeout 9s",
            "--max-cpu 1s",
            "--max-concurrency 15",
            "--max-component 17Mi",
            "--max-http-requests 19",
            "--max-outcome 5Mi",
            "--max-http-connect 1s",
            "--max-children 501",
        ] {
            assert!(flags(text).is_err_and(|error| error.contains(" to ") || error.contains("not in")), "{text}: {:?}", flags(text));
        }
    }

    #[test]
    fn what_goes_beyond_is_refused_with_key_value_and_flag() {
        let low = flags("--max-memory 64Mi --max-timeout 10s --max-cpu 2s --max-concurrency 16 --max-children 100 --max-log 64Ki")
            .expect("valid");
        let high = flags("--max-memory 1Gi --max-timeout 10m --max-cpu 2m --max-concurrency 300").expect("valid");
        for (yaml, words) in [
            ("memory: 65Mi", "a \"memory\" of 65Mi, more than the 64Mi that this host gives (`--max-memory` of berth run)"),
            ("timeout: 11s", "(`--max-timeout` of berth run)"),
            ("cpu: 3s", "a \"cpu\" of 3s, more than the 2s"),
            ("concurrency: 17", "a \"concurrency\" of 17, more than the 16"),
            (
                "limits: {children: 101}",
                "a \"limits.children\" of 101, more than the 100 that this host gives (`--max-children` of berth run)",
            ),
            ("limits: {log: 1Mi}", "a \"limits.log\" of 1Mi, more than the 64Ki that this host gives (`--max-log` of berth run)"),
        ] {
            let config = Config::parse(yaml.as_bytes()).expect("valid");
            let refusal = low.check(&config).expect_err(yaml);
            assert!(refusal.message.contains(words) && refusal.reason == reason::INVALID_CONFIG, "{refusal}");
            assert_eq!(high.check(&config), Ok(()), "{yaml}");
        }
    }

    #[test]
    fn a_component_beyond_the_flag_is_refused() {
        let package = crate::package::open("p", [("a.wasm".to_owned(), vec![0; 2000].into())].into_iter()).expect("opens");
        let ceilings = flags("--max-component 1Ki").expect("valid");
        let refusal = ceilings.check_component(&package).expect_err("refused");
        assert!(refusal.message.contains("2000 bytes is larger than the 1Ki") && refusal.reason == reason::TOO_LARGE, "{refusal}");
        assert_eq!(Ceilings::default().check_component(&package), Ok(()));
    }
}
