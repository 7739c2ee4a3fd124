//! Rules about crates: names, edges, lints, a reason for every dependency.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Finding;

/// The crates of ours that each crate may use, from section "Crates" of ARCHITECTURE.md. A change needs a decision
/// record.
const EDGES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("fuse", &["base"]),
    ("layout", &["base"]),
    ("wire", &["base", "layout"]),
    ("drive", &["base", "wire"]),
    ("meta", &["base", "layout", "wire"]),
    ("control", &["base", "layout", "wire", "meta"]),
    ("client", &["base", "layout", "wire"]),
    ("posix", &["base", "fuse", "client"]),
    ("s3", &["base", "client"]),
    ("upkeep", &["base", "layout", "wire", "client"]),
    ("admin", &["base", "wire", "client"]),
    (
        "forebay",
        &[
            "base", "fuse", "layout", "wire", "drive", "meta", "control", "client", "posix", "s3", "upkeep",
            "admin",
        ],
    ),
    (
        "sim",
        &[
            "base", "fuse", "layout", "wire", "drive", "meta", "control", "client", "posix", "s3", "upkeep",
            "admin",
        ],
    ),
    ("xtask", &["base", "fuse"]),
];

/// Third-party crates that only some of our crates may use.
const RESTRICTED: &[(&str, &[&str])] = &[
    ("anyhow", &["forebay", "sim", "xtask"]),
    ("clap", &["forebay"]),
    ("indicatif", &["forebay"]),
    ("io-uring", &["drive", "fuse"]),
    ("redb", &["meta"]),
];

const FORBIDDEN_NAMES: &[&str] = &["common", "utils", "util", "helpers", "helper", "manager", "misc"];

const REASONS: &str = "docs/develop/dependencies.md";

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
    let reasons = std::fs::read_to_string(root.join(REASONS)).with_context(|| format!("read {REASONS}"))?;
    let workspace = std::fs::read_to_string(root.join("Cargo.toml")).context("read Cargo.toml")?;
    let mut findings = check_reasons(&workspace, &reasons);
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

/// Checks that the third-party dependencies in the workspace's manifest are those in the table of reasons.
fn check_reasons(manifest: &str, reasons: &str) -> Vec<Finding> {
    let section =
        manifest.lines().zip(1..).skip_while(|(line, _)| line.trim() != "[workspace.dependencies]").skip(1);
    let entries = section.take_while(|(line, _)| !line.starts_with('['));
    let foreign = entries.filter(|(line, _)| !line.contains("path ="));
    let named: Vec<(&str, usize)> = foreign
        .filter_map(|(line, number)| Some((line.split_once('=')?.0.trim(), number)))
        .filter(|(name, _)| !name.starts_with('#'))
        .collect();
    let rows: Vec<(&str, usize)> = reasons
        .lines()
        .zip(1..)
        .filter_map(|(line, number)| Some((line.strip_prefix("| `")?.split_once('`')?.0, number)))
        .collect();
    let finding = |path: &str, line: usize, message: String| Finding { path: path.into(), line, message };
    let unexplained = named.iter().filter(|(name, _)| !rows.iter().any(|(row, _)| row == name));
    let stale = rows.iter().filter(|(row, _)| !named.iter().any(|(name, _)| name == row));
    unexplained
        .map(|(name, line)| {
            finding("Cargo.toml", *line, format!("dependency has no reason in {REASONS}: name={name}"))
        })
        .chain(
            stale.map(|(row, line)| finding(REASONS, *line, format!("reason for no dependency: name={row}"))),
        )
        .collect()
}

/// Dependencies without those of tests, benchmarks and build scripts.
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
    fn restricted_dependencies_are_for_some_crates_only() {
        check(
            "client",
            json!([{ "name": "io-uring", "kind": null }]),
            LINTS,
            &["io-uring is for drive and fuse only"],
        );
        check("drive", json!([{ "name": "io-uring", "kind": null }]), LINTS, &[]);
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
    fn every_dependency_has_a_reason_and_every_reason_a_dependency() {
        let manifest = "[workspace.dependencies]\nbase = { path = \"crates/base\" }\n\nserde = \"1\"\nlibc = \"0.2\"\n\n\
                        [profile.dev]\npanic = \"abort\"\n";
        let findings =
            check_reasons(manifest, "| crate | why |\n|---|---|\n| `serde` | x |\n| `gone` | y |\n");
        let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("Cargo.toml:5: ") && lines[0].ends_with("name=libc"), "{lines:?}");
        assert!(lines[1].contains(":4: ") && lines[1].ends_with("name=gone"), "{lines:?}");
    }

    #[test]
    fn edges_are_those_of_the_architecture() {
        let page = std::fs::read_to_string("../ARCHITECTURE.md").unwrap();
        let cells = page.lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
        let rows: Vec<_> = cells.filter(|row| row.len() == 6 && row[2].starts_with('`')).collect();
        let name = |row: &[&str]| row[2].trim_matches('`').to_owned();
        let ours: Vec<&str> = EDGES.iter().map(|(name, _)| *name).filter(|name| *name != "xtask").collect();
        assert_eq!(rows.iter().map(|row| name(row)).collect::<Vec<_>>(), ours);
        for (row, (name, allowed)) in rows.iter().zip(EDGES) {
            let all = [
                "base", "fuse", "layout", "wire", "drive", "meta", "control", "client", "posix", "s3",
                "upkeep", "admin",
            ];
            match row[4] {
                "–" => assert!(allowed.is_empty(), "{name}"),
                "all above" => assert_eq!(*allowed, all, "{name}"),
                listed => assert_eq!(*allowed, listed.split(", ").collect::<Vec<_>>(), "{name}"),
            }
        }
    }

    #[test]
    fn edges_point_down() {
        for (at, (name, allowed)) in EDGES.iter().enumerate() {
            let below: Vec<&str> = EDGES[..at].iter().map(|(name, _)| *name).collect();
            assert!(allowed.iter().all(|allowed| below.contains(allowed)), "{name}");
        }
    }
}
