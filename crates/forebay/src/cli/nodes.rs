//! `join`, `node` and `token`.

use std::path::Path;
use std::time::Duration;

use admin::{
    AddDrive, ClientInfo, CreateToken, DrainNode, DriveInfo, NodeDrain, NodeInfo, SetMaintenance, TokenInfo,
    TokenRights,
};
use anyhow::{Result, bail};
use base::units::format_duration;
use comfy_table::Table;
use serde::Serialize;
use wire::rights::Squash;

use super::args::{ClientCommand, Domain, JoinArgs, NodeCommand, Role, RoleArgs, S3Command, TokenCommand};
use super::output::{Format, bytes, print, table};
use super::{absolute, ask, env, of_cluster, picture, run_here, start, status_with_drives};
use crate::checks::shown;
use crate::guest::Guest;
use crate::member::{JoinOptions, join as join_cluster};
use crate::node::{NodeDir, is_locked};

/// What `join --json` prints.
#[derive(Serialize)]
struct Joined {
    node: NodeInfo,
    drives: Vec<DriveInfo>,
    filesystems: Vec<Survives>,
}

#[derive(Serialize)]
struct Survives {
    name: String,
    profile: String,
    protection: String,
}

pub(super) fn join(args: JoinArgs) -> Result<()> {
    if args.token.is_for_clients {
        return join_as_client(&args);
    }
    let is_witness = args.token.is_for_witnesses;
    if is_witness && (!args.drive_paths.is_empty() || args.drives.is_some_and(|drives| drives > 0)) {
        bail!("the token is for witnesses, which have no drives: leave --drive and --drives out");
    }
    let dir = NodeDir::new(&args.dir);
    let named = |wanted: fn(&Domain) -> Option<&String>| {
        args.domain.iter().find_map(wanted).cloned().unwrap_or_default()
    };
    let zone = named(|domain| if let Domain::Zone(zone) = domain { Some(zone) } else { None });
    let rack = named(|domain| if let Domain::Rack(rack) = domain { Some(rack) } else { None });
    let options = JoinOptions {
        token: args.token.clone(),
        name: args.name.clone(),
        listen: args.address.address,
        advertise: args.address.advertise.clone(),
        zone,
        rack,
    };
    run_here(join_cluster(&env(), &dir, options))?;
    if !is_locked(&env(), &dir) {
        start::in_background(&dir, ["start".into(), args.dir.clone().into()])?;
    }
    let here = here(&dir)?;
    // A repetition after an error makes only what is missing.
    let known: Vec<String> = drives_of(&args.dir, here)?.into_iter().map(|drive| drive.path).collect();
    let named: Vec<String> = args.drive_paths.iter().map(|path| absolute(path)).collect::<Result<_>>()?;
    let files_there = known.iter().filter(|path| !named.contains(path)).count();
    let files = args.drives.unwrap_or(u32::from(named.is_empty() && !is_witness)) as usize;
    let named = named.into_iter().filter(|path| !known.contains(path)).map(Some);
    let wanted = named.chain((files_there..files).map(|_| None));
    for path in wanted {
        let request = AddDrive { path, size_bytes: args.drive_size, node: None };
        ask(&args.dir, |client| async move { client.add_drive(&request).await })?;
    }
    show_joined(&args.dir, here, args.json.into())
}

/// The number of the node in a directory.
fn here(dir: &NodeDir) -> Result<u32> {
    let identity = crate::identity::IdentityFiles::new(&env(), dir);
    match identity.membership()? {
        Some(membership) => Ok(membership.node.0),
        None => bail!("the node in {} has not joined a cluster", dir.root().display()),
    }
}

fn drives_of(dir: &Path, node: u32) -> Result<Vec<DriveInfo>> {
    let status = picture(dir)?;
    Ok(status.drives.into_iter().filter(|drive| drive.node == node && drive.state != "out").collect())
}

fn show_joined(dir: &Path, here: u32, format: Format) -> Result<()> {
    let status = of_cluster(status_with_drives(dir, here)?)?;
    let nodes = ask(dir, |client| async move { client.nodes().await })?;
    let Some(node) = nodes.into_iter().find(|node| node.id == here) else {
        bail!("the cluster does not know this node any more: node={here}");
    };
    let filesystems = status.filesystems.iter().map(|filesystem| Survives {
        name: filesystem.name.clone(),
        profile: filesystem.profile.clone(),
        protection: filesystem.protection.clone(),
    });
    let joined = Joined {
        node,
        filesystems: filesystems.collect(),
        drives: status.drives.into_iter().filter(|drive| drive.node == here).collect(),
    };
    print(format, &joined, |joined| {
        let shown = dir.display();
        if joined.node.witness {
            let NodeInfo { id, name, addresses, .. } = &joined.node;
            return format!(
                "node {id} ({name}) has joined as a witness; others reach it at {}\n  {:<10} forebay log move {shown} etcd, once two \
                 nodes with drives are there",
                addresses.join(", "),
                "then"
            );
        }
        let mut text = format!(
            "node {} ({}) has joined, with {} drives; others reach it at {}\n",
            joined.node.id,
            joined.node.name,
            joined.drives.len(),
            joined.node.addresses.join(", ")
        );
        for Survives { name, profile, protection } in &joined.filesystems {
            text += &format!("  {name:<10} {profile}: {protection}\n");
            text += &format!("  {:<10} spread what is stored: forebay fs balance {shown} {name}\n", "");
        }
        text += &format!("  {:<10} forebay mount {shown} PATH", "mount with");
        text
    })
}

fn stop_check(dir: &Path, id: u32, format: Format) -> Result<()> {
    let check = ask(dir, |client| async move { client.stop_check(id).await })?;
    print(format, &check, |check| {
        let lines = |mark: &str, texts: &[String]| -> String {
            texts.iter().map(|text| format!("  {mark} {text}\n")).collect()
        };
        let verdict = if check.stops.is_empty() { "may be stopped" } else { "must not be stopped now" };
        let text = format!("node {} ({}) {verdict}\n", check.node, check.name);
        (text + &lines("!", &check.stops) + &lines("-", &check.notes)).trim_end().to_owned()
    })?;
    if !check.stops.is_empty() {
        bail!("something would stop: {}", check.stops[0]);
    }
    Ok(())
}

pub(super) fn node(command: NodeCommand) -> Result<()> {
    match command {
        NodeCommand::Maintenance { dir, id, time, end: _, force, json } => {
            let request = SetMaintenance { for_s: time.map(|time| time.as_secs()), force };
            let node = ask(&dir, |client| async move { client.set_maintenance(id, &request).await })?;
            print(json.into(), &node, |node| match node.maintenance_s {
                Some(left) => format!(
                    "node {} ({}) is in maintenance for {}: nobody takes over what its drives hold",
                    node.id,
                    node.name,
                    format_duration(left)
                ),
                None => format!("node {} ({}) is not in maintenance", node.id, node.name),
            })
        }
        NodeCommand::Drain { dir, id, dry_run, abort, json } => {
            let request = DrainNode { dry_run, abort };
            let drain = ask(&dir, |client| async move { client.drain_node(id, request).await })?;
            print(json.into(), &drain, |drain| if abort { kept(drain) } else { drained(drain, dry_run) })
        }
        NodeCommand::StopCheck { dir, id, json } => stop_check(&dir, id, json.into()),
        NodeCommand::List { dir, json } => {
            let nodes = ask(&dir, |client| async move { client.nodes().await })?;
            print(json.into(), &nodes, |nodes| node_table(nodes).to_string())
        }
        NodeCommand::Remove { dir, id, json } => {
            let node = ask(&dir, |client| async move { client.remove_node(id).await })?;
            print(json.into(), &node, |node| format!("node is removed: id={} name={}", node.id, node.name))
        }
    }
}

fn kept(drain: &NodeDrain) -> String {
    let NodeDrain { node, name, drives, .. } = drain;
    format!(
        "node {node} ({name}) is not emptied any more: {} drives are in use again; what has moved completely stays there \
         (`forebay fs balance` spreads it anew)",
        drives.len()
    )
}

fn drained(drain: &NodeDrain, dry_run: bool) -> String {
    let NodeDrain { node, name, drives, move_bytes, free_bytes, eta_s, owner } = drain;
    let happens = if dry_run { "would be emptied" } else { "is being emptied" };
    let mut text = format!(
        "node {node} ({name}) {happens}: {} drives, {} to move, {} free at other nodes, {} at the full rate",
        drives.len(),
        bytes(*move_bytes),
        bytes(*free_bytes),
        format_duration(*eta_s)
    );
    if *owner {
        text += "\nit owns the metadata: before it is removed, another node must do that (forebay node maintenance)";
    }
    text
}

fn node_table(nodes: &[NodeInfo]) -> Table {
    let mut table = table(&[
        "NODE",
        "NAME",
        "STATE",
        "ZONE",
        "RACK",
        "DRIVES",
        "CAPACITY",
        "VERSION",
        "LATENCY",
        "CLOCK",
        "CERTIFICATE",
        "ADDRESSES",
        "",
    ]);
    let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    for node in nodes {
        table.add_row([
            node.id.to_string(),
            node.name.clone(),
            match node.maintenance_s {
                Some(left) => format!("{}, in maintenance for {}", node.state, format_duration(left)),
                None => node.state.clone(),
            },
            or_none(&node.zone),
            or_none(&node.rack),
            node.drives.to_string(),
            bytes(node.capacity_bytes),
            or_none(node.version.as_deref().unwrap_or_default()),
            node.latency_us
                .map_or_else(|| "-".to_owned(), |latency_us| shown(Duration::from_micros(latency_us))),
            node.clock_ahead_ms.map_or_else(|| "-".to_owned(), |ahead_ms| format!("{ahead_ms:+} ms")),
            node.certificate_days.map_or_else(|| "-".to_owned(), |days| format!("{days} days")),
            or_none(&node.addresses.join(" ")),
            match node {
                NodeInfo { owner: true, .. } => "owns the metadata",
                NodeInfo { witness: true, .. } => "witness",
                _ => "",
            }
            .to_owned(),
        ]);
    }
    table
}

/// What `s3 endpoints --json` prints of each node.
#[derive(Serialize)]
struct EndpointInfo {
    node: u32,
    name: String,
    /// `None`: it serves no S3 now, or does not answer.
    url: Option<String>,
    /// Whether only processes of that machine reach it.
    local: bool,
}

/// Whether a URL such as `http://127.0.0.1:9000` leads to the machine itself.
fn is_local(url: &str) -> bool {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

pub(super) fn s3(command: S3Command) -> Result<()> {
    let S3Command::Endpoints { dir, json } = command;
    let nodes = ask(&dir, |client| async move { client.nodes().await })?;
    let of = |NodeInfo { id, name, s3, .. }: NodeInfo| {
        let local = s3.as_deref().is_some_and(is_local);
        EndpointInfo { node: id, name, url: s3, local }
    };
    let endpoints: Vec<EndpointInfo> = nodes.into_iter().map(of).collect();
    print(json.into(), &endpoints, |endpoints| {
        let mut table = table(&["NODE", "NAME", "URL", ""]);
        for EndpointInfo { node, name, url, local } in endpoints {
            let reach = if *local { "from that machine only: start it with --s3 ADDRESS:PORT" } else { "" };
            table.add_row([&node.to_string(), name, url.as_deref().unwrap_or("-"), reach]);
        }
        table.to_string()
    })
}

pub(super) fn token(command: TokenCommand) -> Result<()> {
    match command {
        TokenCommand::Create { dir, expires, uses, role, json } => {
            let witness = role.role == Role::Witness;
            let request =
                CreateToken { expires_in_s: expires.as_secs(), uses, client: rights(role)?, witness };
            let new = ask(&dir, |client| async move { client.create_token(&request).await })?;
            print(json.into(), &new, |new| new.token.clone())
        }
        TokenCommand::List { dir, json } => {
            let tokens = ask(&dir, |client| async move { client.tokens().await })?;
            print(json.into(), &tokens, |tokens| token_table(tokens).to_string())
        }
        TokenCommand::Remove { dir, id, json } => {
            let token = ask(&dir, |client| async move { client.remove_token(id).await })?;
            print(json.into(), &token, |token| format!("token is removed: id={}", token.id))
        }
    }
}

/// What clients may do that join with a token; `None`: it is for nodes.
fn rights(RoleArgs { role, fs, ro, squash }: RoleArgs) -> Result<Option<TokenRights>> {
    match role {
        Role::Client => {
            let squash = squash.map(Into::into).unwrap_or_default();
            Ok(Some(TokenRights { filesystem: fs, read_only: ro, squash }))
        }
        Role::Node | Role::Witness if fs.is_some() || ro || squash.is_some() => {
            bail!("--fs, --ro and --squash limit clients: give --role client; a node may do everything")
        }
        Role::Node | Role::Witness => Ok(None),
    }
}

pub(super) fn client(command: ClientCommand) -> Result<()> {
    match command {
        ClientCommand::List { dir, json } => {
            let clients = ask(&dir, |client| async move { client.clients().await })?;
            print(json.into(), &clients, |clients| client_table(clients).to_string())
        }
        ClientCommand::Remove { dir, id, json } => {
            let client = ask(&dir, |client| async move { client.remove_client(id).await })?;
            print(json.into(), &client, |client| {
                format!("client is removed: id={} name={}", client.id, client.name)
            })
        }
    }
}

fn client_table(clients: &[ClientInfo]) -> Table {
    let mut table = table(&["CLIENT", "NAME", "FILESYSTEM", "ACCESS", "AS NOBODY", "VERSION"]);
    for client in clients {
        let filesystem = client.filesystem.clone().unwrap_or_else(|| "all".to_owned());
        let access = if client.read_only { "reads" } else { "reads and writes" };
        let squash = match client.squash {
            Squash::Root => "root",
            Squash::All => "all users",
            Squash::None => "-",
        };
        let version = client.version.as_deref().filter(|version| !version.is_empty()).unwrap_or("-");
        table.add_row([&client.id.to_string(), &client.name, &filesystem, access, squash, version]);
    }
    table
}

/// Makes this machine a client.
fn join_as_client(args: &JoinArgs) -> Result<()> {
    let is_for_nodes = !args.drive_paths.is_empty()
        || args.drives.is_some_and(|drives| drives > 0)
        || args.address.address.is_some()
        || !args.address.advertise.is_empty()
        || !args.domain.is_empty();
    if is_for_nodes {
        bail!(
            "the token is for clients, which store nothing and are not reached: leave options for nodes out"
        );
    }
    let dir = NodeDir::new(&args.dir);
    let guest = run_here(Guest::join(&env(), &dir, &args.token, args.name.clone()))?;
    print(args.json.into(), &JoinedClient { client: guest.client }, |joined| {
        format!(
            "client {} has joined\n  {:<10} forebay mount {} PATH",
            joined.client,
            "mount with",
            args.dir.display()
        )
    })
}

/// What `join --json` prints for a client.
#[derive(Serialize)]
struct JoinedClient {
    client: u32,
}

fn token_table(tokens: &[TokenInfo]) -> Table {
    let mut table = table(&["TOKEN", "FOR", "STATE", "USES LEFT", "EXPIRES"]);
    for token in tokens {
        let expires = match token.expires_in_s {
            0 => "-".to_owned(),
            left_s => format!("in {left_s} s"),
        };
        table.add_row([
            token.id.to_string(),
            format!("{}s", token.role),
            token.state.clone(),
            token.uses_left.to_string(),
            expires,
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_that_only_their_machine_reaches_are_told() {
        for url in ["http://127.0.0.1:9000", "https://[::1]:9000", "http://localhost:9000"] {
            assert!(is_local(url), "{url}");
        }
        for url in [
            "http://192.0.2.1:9000",
            "http://[2001:db8::1]:9000",
            "http://0.0.0.0:9000",
            "http://a.example:1",
        ] {
            assert!(!is_local(url), "{url}");
        }
    }
}
