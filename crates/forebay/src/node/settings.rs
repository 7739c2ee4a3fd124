//! `DIR/settings.json`: settings of `start` that the next start keeps; drawn in `docs/formats/node.md`.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use base::env::Env;
use drive::Trim;
use serde::{Deserialize, Serialize};

use super::NodeDir;

/// Whether drives give unused space back to the device or filesystem below them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TrimChoice {
    /// Devices give space back if they can; files keep their size.
    #[default]
    Devices,
    /// Files give space back too: they take only the used space, and cannot write while the filesystem below them is
    /// full.
    Always,
    /// No drive gives space back.
    Never,
}

impl From<TrimChoice> for Trim {
    fn from(choice: TrimChoice) -> Self {
        match choice {
            TrimChoice::Devices => Trim::Devices,
            TrimChoice::Always => Trim::Always,
            TrimChoice::Never => Trim::Never,
        }
    }
}

/// The kept settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    /// Memory that the node may use; `None`: the default for the machine.
    pub(crate) memory_bytes: Option<u64>,
    /// Whether drives give space back.
    pub(crate) trim: TrimChoice,
    /// Where other machines reach the node; `None`: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) listen: Option<SocketAddr>,
    /// What others are told instead of `listen`: `host:port`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) advertise: Vec<String>,
    /// Where metrics are told; `None`: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
}

/// What `--metrics` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetricsChoice {
    Off,
    At(SocketAddr),
}

impl std::str::FromStr for MetricsChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            text => text.parse().map(Self::At).map_err(|_| "it is off or ADDRESS:PORT".to_owned()),
        }
    }
}

impl Settings {
    /// The kept settings, or defaults.
    pub(crate) fn load(env: &Env, dir: &NodeDir) -> Result<Self> {
        let path = dir.settings();
        if !env.files.exists(&path) {
            return Ok(Self::default());
        }
        let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("not understood: {}", path.display()))
    }

    /// Changes where the node is for others, as far as that is asked for.
    pub(super) fn listen_at(&mut self, listen: Option<SocketAddr>, advertise: &[String]) -> Result<()> {
        if listen.is_some() {
            (self.listen, self.advertise) = (listen, Vec::new());
        }
        if !advertise.is_empty() {
            self.advertise = advertise.to_vec();
        }
        for address in &self.advertise {
            control::check_address(address)?;
        }
        if self.listen.is_some_and(|listen| listen.ip().is_unspecified()) && self.advertise.is_empty() {
            bail!(
                "all addresses of this machine: say with --advertise HOST:PORT at which one others reach it"
            );
        }
        if self.listen.is_none() && !self.advertise.is_empty() {
            bail!("--advertise needs an address where the node listens: --address ADDRESS");
        }
        Ok(())
    }

    /// What others are told of where the node is.
    pub(crate) fn advertised(&self) -> Vec<String> {
        match self.listen {
            Some(listen) if self.advertise.is_empty() => vec![listen.to_string()],
            Some(_) => self.advertise.clone(),
            None => Vec::new(),
        }
    }

    /// Writes the settings.
    pub(super) fn save(&self, env: &Env, dir: &NodeDir) -> Result<()> {
        let path = dir.settings();
        let bytes = serde_json::to_vec_pretty(self).context("encoding the node's settings")?;
        env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn settings_are_what_the_format_says() {
        let settings =
            Settings { memory_bytes: Some(4 << 30), trim: TrimChoice::Always, ..Settings::default() };
        let text = r#"{"memory_bytes":4294967296,"trim":"always"}"#;
        assert_eq!(serde_json::to_string(&settings).unwrap(), text);
        assert_eq!(serde_json::from_str::<Settings>(text).unwrap(), settings);
        assert_eq!(serde_json::from_str::<Settings>("{}").unwrap(), Settings::default());
        assert!(serde_json::from_str::<Settings>(r#"{"memory":1}"#).is_err());
    }
}
