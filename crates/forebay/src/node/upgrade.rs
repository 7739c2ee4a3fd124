//! The programs of nodes and clients, and the formats that they may write.

use std::collections::BTreeMap;

use admin::{AdminError, ProgramInfo, UpgradeInfo};
use base::NodeId;
use base::program::Program;
use control::{Plan, Upgrade};

use super::Node;
use super::elsewhere::Told;
use super::management::failed;

fn program(Told { condition, .. }: Told) -> Program {
    Program { version: condition.version, format_level: condition.format_level }
}

fn info(id: u32, name: &str, program: Option<&Program>) -> ProgramInfo {
    ProgramInfo {
        id,
        name: name.to_owned(),
        version: program.map(|program| program.version.clone()),
        format_level: program.map(Program::level),
    }
}

impl Node {
    /// The programs of the nodes that answer.
    async fn node_programs(&self) -> BTreeMap<NodeId, Program> {
        self.conditions().await.into_iter().map(|(node, told)| (node, program(told))).collect()
    }

    pub(super) async fn upgrade_now(&self) -> UpgradeInfo {
        let nodes = self.node_programs().await;
        let levels = nodes.iter().map(|(node, program)| (*node, program.level())).collect();
        let clients = self.others.network.client_programs();
        let state = self.state.lock().await;
        let cluster = &state.cluster;
        let Upgrade { level, newest, possible, behind } = Upgrade::of(cluster, &levels);
        let node_info = |node: &control::NodeRecord| info(node.id.0, &node.name, nodes.get(&node.id));
        let client_info =
            |client: &control::ClientRecord| info(client.id, &client.name, clients.get(&client.id));
        UpgradeInfo {
            format_level: level,
            newest_level: newest,
            finalize_to: (possible > level).then_some(possible),
            nodes: cluster.nodes.values().map(node_info).collect(),
            clients: cluster.clients.values().map(client_info).collect(),
            behind: behind.into_iter().map(|node| node.0).collect(),
        }
    }

    pub(super) async fn finalize_upgrade_now(&self) -> Result<UpgradeInfo, AdminError> {
        let programs = self.node_programs().await;
        let levels = programs.iter().map(|(node, program)| (*node, program.level())).collect();
        let decide = |plan: &mut Plan| {
            let before = plan.next().record.format_level;
            Ok(plan.finalize_upgrade(&levels).level > before)
        };
        let is_raised = self.plan(decide).await.map_err(failed)?;
        let info = self.upgrade_now().await;
        if is_raised {
            tracing::warn!(level = info.format_level, "all nodes write formats of this level from now on");
            return Ok(info);
        }
        if info.newest_level == info.format_level {
            return Ok(info);
        }
        let behind = info.nodes.iter().filter(|node| info.behind.contains(&node.id)).map(text);
        Err(AdminError::conflict(format!(
            "formats of level {} may not be written yet, because not every node is known to read them: {}; start each with the newest \
             program, and ask again (a node that is gone for good: forebay node remove)",
            info.newest_level,
            behind.collect::<Vec<_>>().join(", ")
        )))
    }
}

/// A node that is behind, with the reason.
fn text(ProgramInfo { id, name, version, format_level }: &ProgramInfo) -> String {
    match (version, format_level) {
        (Some(version), Some(level)) => format!("node {id} ({name}) has {version}, level {level}"),
        _ => format!("node {id} ({name}) does not answer"),
    }
}
