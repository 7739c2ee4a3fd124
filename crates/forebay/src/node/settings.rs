//! `DIR/settings.json`: settings of `start` that the next start keeps; drawn in `docs/formats/node.md`.

use anyhow::{Context, Result};
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    /// Memory that the node may use; `None`: the default for the machine.
    pub(crate) memory_bytes: Option<u64>,
    /// Whether drives give space back.
    pub(crate) trim: TrimChoice,
}

impl Settings {
    /// The kept settings, or defaults.
    pub(super) fn load(env: &Env, dir: &NodeDir) -> Result<Self> {
        let path = dir.settings();
        if !env.files.exists(&path) {
            return Ok(Self::default());
        }
        let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("not understood: {}", path.display()))
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
        let settings = Settings { memory_bytes: Some(4 << 30), trim: TrimChoice::Always };
        let text = r#"{"memory_bytes":4294967296,"trim":"always"}"#;
        assert_eq!(serde_json::to_string(&settings).unwrap(), text);
        assert_eq!(serde_json::from_str::<Settings>(text).unwrap(), settings);
        assert_eq!(serde_json::from_str::<Settings>("{}").unwrap(), Settings::default());
        assert!(serde_json::from_str::<Settings>(r#"{"memory":1}"#).is_err());
    }
}
