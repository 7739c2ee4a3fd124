//! Rules about crates: names, edges, lints.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Finding;

/// Which of our crates each may use, from section "Crates" of ARCHITECTURE.md. Changing it is a decision record.
const EDGES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("layout", &["base"]),
    ("wire", &["base", "layout"]),
    ("drive", &["base", "wire"]),
    ("meta", &["base", "layout", "wire"]),
    ("client", &["base", "layout", "wire"]),
    ("posix", &["base", "client"]),
    ("s3", &["base", "client"]),
    ("upkeep", &["base", "layout", "wire", "client"]),
    ("admin", &["base", "wire", "client"]),
    ("forebay", &["base", "layout", "wire", "drive", "meta", "client", "posix", "s3", "upkeep", "admin"]),
    ("sim", &["base", "layout", "wire", "drive", "meta", "client", "posix", "s3", "upkeep", "admin"]),
    ("xtask", &[]),
];

/// Crates of others that only some of ours may use.
const RESTRICTED: &[(&str, &[&str])] = &[
    ("anyhow", &["forebay", "sim", "xtask"]),
    ("clap", &["forebay"]),
    ("fuser", &["posix"]),
    ("indicatif", &["forebay"]),
    ("io-uring", &["drive"]),
    ("redb", &["meta"]),
];

const FORBIDDEN_NAMES: &[&str] = &["common", "utils", "util", "helpers", "helper", "manager", "misc"];

/// Asks cargo for the workspace and checks every member.
pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root)
        .output()
        .context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).context("parse cargo metadata")?;
    let packages = metadata["packages"].as_array().context("packages in cargo metadata")?;
    let mut findings = Vec::new();
    for package in packages {
        let manifest = PathBuf::from(package["manifest_path"].as_str().context("manifest path")?);
        let text =
            std::fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
        let path = manifest.strip_prefix(root).unwrap_or(&manifest);
        findings.extend(check_package(package, path, &text));
    }
    Ok(findings)
}

fn check_package(package: &Value, path: &Path, manifest: &str) -> Vec<Finding> {
    let name = package["name"].as_str().unwrap_or_default();
    let mut messages = Vec::new();
    if name.split(['-', '_']).any(|word| FORBIDDEN_NAMES.contains(&word)) {
        messages.push(format!("crate name says nothing: name={name}"));
    }
    if !inherits_lints(manifest) {
        messages.push("lints of the workspace are not inherited: add [lints] workspace = true".to_owned());
    }
    let allowed = EDGES.iter().find(|(crate_name, _)| *crate_name == name).map(|(_, allowed)| *allowed);
    if allowed.is_none() {
        messages.push(format!("crate is not in the table of edges: name={name}"));
    }
    for dependency in normal_dependencies(package) {
        let ours = EDGES.iter().any(|(crate_name, _)| *crate_name == dependency);
        let restricted = RESTRICTED.iter().find(|(crate_name, _)| *crate_name == dependency);
        if ours && !allowed.unwrap_or_default().contains(&dependency) {
            messages.push(format!("crate edge is not allowed: from={name} to={dependency}"));
        }
        if let Some((_, users)) = restricted.filter(|(_, users)| !users.contains(&name)) {
            messages.push(format!("{dependency} is for {} only", users.join(" and ")));
        }
    }
    messages.into_iter().map(|message| Finding { path: path.to_path_buf(), line: 1, message }).collect()
}

/// Not those of tests and benchmarks, nor of build scripts.
fn normal_dependencies(package: &Value) -> impl Iterator<Item = &str> {
    let dependencies = package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
    dependencies.iter().filter(|dependency| dependency["kind"].is_null()).filter_map(|d| d["name"].as_str())
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[lints]").skip(1);
    lines
        .by_ref()
        .take_while(|line| !line.starts_with('['))
        .any(|line| line.replace(' ', "") == "workspace=true")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const LINTS: &str = "[package]\nname = \"x\"\n\n[lints]\nworkspace = true\n\n[dependencies]\n";

    #[track_caller]
    fn check(name: &str, dependencies: Value, manifest: &str, expected: &[&str]) {
        let package = json!({ "name": name, "dependencies": dependencies });
        let findings = check_package(&package, Path::new("Cargo.toml"), manifest);
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(messages.len(), expected.len(), "{messages:?}");
        for (message, part) in messages.iter().zip(expected) {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn only_listed_edges_are_allowed() {
        check(
            "drive",
            json!([{ "name": "wire", "kind": null }, { "name": "serde", "kind": null }]),
            LINTS,
            &[],
        );
        check("drive", json!([{ "name": "meta", "kind": null }]), LINTS, &["from=drive to=meta"]);
        check("drive", json!([{ "name": "meta", "kind": "dev" }]), LINTS, &[]);
        check("base", json!([{ "name": "layout", "kind": null }]), LINTS, &["from=base to=layout"]);
        check(
            "sim",
            json!([{ "name": "drive", "kind": null }, { "name": "meta", "kind": null }]),
            LINTS,
            &[],
        );
    }

    #[test]
    fn some_dependencies_are_for_some_crates() {
        check("client", json!([{ "name": "fuser", "kind": null }]), LINTS, &["fuser is for posix only"]);
        check("posix", json!([{ "name": "fuser", "kind": null }]), LINTS, &[]);
    }

    #[test]
    fn new_crates_and_empty_names_are_reported() {
        check("tape", json!([]), LINTS, &["name=tape"]);
        check("drive-utils", json!([]), LINTS, &["says nothing", "not in the table"]);
    }

    #[test]
    fn every_crate_inherits_the_lints() {
        check(
            "base",
            json!([]),
            "[package]\n[dependencies]\nworkspace = true\n",
            &["[lints] workspace = true"],
        );
        check(
            "base",
            json!([]),
            "[lints]\n[dependencies]\nworkspace = true\n",
            &["[lints] workspace = true"],
        );
        check("base", json!([]), "[lints]\nworkspace=true", &[]);
    }

    #[test]
    fn edges_point_down() {
        for (at, (name, allowed)) in EDGES.iter().enumerate() {
            let below: Vec<&str> = EDGES[..at].iter().map(|(name, _)| *name).collect();
            assert!(allowed.iter().all(|allowed| below.contains(allowed)), "{name}");
        }
    }
}
