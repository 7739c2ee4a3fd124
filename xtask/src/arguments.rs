//! Options of subcommands: `--name VALUE` and `--flag`. Unknown ones are refused.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// The given options, by name without dashes; flags have an empty value.
#[derive(Debug)]
pub(crate) struct Arguments(BTreeMap<String, String>);

impl Arguments {
    /// `flags` take no value, `options` take one.
    pub(crate) fn parse(arguments: &[&str], options: &[&str], flags: &[&str]) -> Result<Self> {
        let mut found = BTreeMap::new();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let name = argument.strip_prefix("--").with_context(|| format!("not an option: {argument}"))?;
            let value = if flags.contains(&name) {
                ""
            } else if options.contains(&name) {
                rest.next().with_context(|| format!("option needs a value: --{name}"))?
            } else {
                bail!("unknown option: --{name}; there are: {}", [options, flags].concat().join(" "));
            };
            found.insert(name.to_owned(), value.to_owned());
        }
        Ok(Self(found))
    }

    pub(crate) fn is_set(&self, flag: &str) -> bool {
        self.0.contains_key(flag)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of an option, or the default.
    pub(crate) fn value<T>(&self, name: &str, default: T) -> Result<T>
    where
        T: FromStr,
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        self.text(name)
            .map_or(Ok(default), |text| text.parse().with_context(|| format!("--{name} cannot be {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(arguments: &[&str], expected: Result<u64, &str>) {
        let rounds = Arguments::parse(arguments, &["rounds"], &["plain"])
            .and_then(|arguments| arguments.value("rounds", 7))
            .map_err(|error| error.to_string());
        assert_eq!(rounds, expected.map_err(str::to_owned));
    }

    #[test]
    fn options_have_values_and_defaults() {
        check(&["--plain", "--rounds", "3"], Ok(3));
        check(&[], Ok(7));
    }

    #[test]
    fn malformed_options_are_refused() {
        check(&["rounds"], Err("not an option: rounds"));
        check(&["--rounds"], Err("option needs a value: --rounds"));
        check(&["--round", "3"], Err("unknown option: --round; there are: rounds plain"));
        check(&["--rounds", "x"], Err("--rounds cannot be x"));
    }
}
