//! `check`.

use std::process::ExitCode;

use admin::{AdminClient, CallError, NodeCheck};
use anyhow::Result;
use wire::cluster::{CheckParts, Finding, Grade};

use super::args::CheckArgs;
use super::output::{Format, print};
use super::progress::while_shown;
use super::{env, run_here};
use crate::checks;
use crate::identity::{IdentityFiles, OWNER, hostname};
use crate::node::{NodeDir, is_locked};

/// Exit status if something does not work.
const PROBLEM: u8 = 1;
/// Exit status if it could not be looked at.
const FAILED: u8 = 2;

/// Returns the exit status of the process.
pub(super) fn check(args: &CheckArgs) -> ExitCode {
    let looked = run_here(look(args)).and_then(|checks| {
        show(&checks, args.json.into())?;
        Ok(checks)
    });
    match looked {
        Ok(checks) if checks.iter().flat_map(|check| &check.findings).any(is_problem) => {
            ExitCode::from(PROBLEM)
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn is_problem(finding: &Finding) -> bool {
    finding.grade == Grade::Problem
}

async fn look(args: &CheckArgs) -> Result<Vec<NodeCheck>> {
    let (env, dir) = (env(), NodeDir::new(&args.dir));
    let parts = CheckParts { drives: !args.no_drives, network: !args.no_network };
    let here = IdentityFiles::new(&env, &dir).membership()?.map_or(OWNER, |membership| membership.node);
    if !is_locked(&env, &dir) {
        if args.all {
            anyhow::bail!(
                "no node runs in {}: leave --all out to look at this machine only",
                args.dir.display()
            );
        }
        let looking = checks::look(&env, &dir, CheckParts { network: false, ..parts }, None);
        let findings = while_shown("looking at this machine", looking).await;
        return Ok(vec![NodeCheck { node: here.0, name: hostname(), findings }]);
    }
    let client = AdminClient::new(dir.socket().as_path());
    if !args.all {
        let asking = client.check(here.0, parts);
        return Ok(vec![while_shown("looking at this node", asking).await?]);
    }
    let nodes = client.nodes().await?;
    let mut checks = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        // One after another, so that they do not measure each other.
        let what = format!("looking at node {} ({} of {})", node.id, number + 1, nodes.len());
        let checked = while_shown(&what, client.check(node.id, parts)).await;
        checks.push(checked.or_else(|error| not_looked_at(node.id, &node.name, error))?);
    }
    Ok(checks)
}

/// A node that does not answer is a finding.
fn not_looked_at(node: u32, name: &str, error: CallError) -> Result<NodeCheck> {
    let CallError::Refused(why) = error else { return Err(error.into()) };
    let finding = Finding {
        grade: Grade::Problem,
        code: "node".to_owned(),
        found: why.message,
        cost: "its drives count as away, and what is written now is repaired later".to_owned(),
        advice: "start it, or look at the network to it".to_owned(),
    };
    Ok(NodeCheck { node, name: name.to_owned(), findings: vec![finding] })
}

fn show(checks: &[NodeCheck], format: Format) -> Result<()> {
    print(format, &checks, |checks| {
        let mut text = String::new();
        for NodeCheck { node, name, findings } in *checks {
            text += &format!("node {node} ({name})\n");
            for Finding { grade, code, found, cost, advice } in findings {
                let grade = match grade {
                    Grade::Ok => "ok",
                    Grade::Unknown => "unknown",
                    Grade::Warning => "WARNING",
                    Grade::Problem => "PROBLEM",
                };
                text += &format!("  {grade:<8} {code:<10} {found}\n");
                for (what, said) in [("costs", cost), ("do", advice)] {
                    if !said.is_empty() {
                        text += &format!("  {:<8} {what:>10} {said}\n", "");
                    }
                }
            }
        }
        text.trim_end().to_owned()
    })
}
