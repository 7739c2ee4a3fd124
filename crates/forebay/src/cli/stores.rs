//! `store`.

use admin::{BenchStore, SetStore, StoreInfo, StoreValidationInfo, Verify};
use anyhow::{Context, Result, bail};
use comfy_table::Table;
use wire::store::StoreSpeed;

use super::args::{OneStoreArgs, SetStoreArgs, StoreCommand, StoreSettingsArgs};
use super::output::{bytes, print, table};
use super::progress::while_shown;
use super::users::read_text;
use super::{ask, env};

pub(super) fn store(command: StoreCommand) -> Result<()> {
    match command {
        StoreCommand::Add(SetStoreArgs { dir, name, settings, json }) => {
            let settings = set_store(settings)?;
            let store = ask(&dir, |client| async move { client.add_store(&name, &settings).await })?;
            print(json.into(), &store, |store| format!("store {} is added", store.name))
        }
        StoreCommand::List { dir, json } => {
            let stores = ask(&dir, |client| async move { client.stores().await })?;
            print(json.into(), &stores, |stores| store_table(stores).to_string())
        }
        StoreCommand::Show(OneStoreArgs { dir, name, json }) => {
            let stores = ask(&dir, |client| async move { client.stores().await })?;
            let Some(store) = stores.into_iter().find(|store| store.name == name) else {
                bail!("no such store: name={name} (see `forebay store list {}`)", dir.display());
            };
            print(json.into(), &store, show)
        }
        StoreCommand::Update(SetStoreArgs { dir, name, settings, json }) => {
            let settings = set_store(settings)?;
            let store = ask(&dir, |client| async move { client.update_store(&name, &settings).await })?;
            print(json.into(), &store, |store| format!("store {} is changed", store.name))
        }
        StoreCommand::Remove(OneStoreArgs { dir, name, json }) => {
            let store = ask(&dir, |client| async move { client.remove_store(&name).await })?;
            print(json.into(), &store, |store| {
                format!("store {} is removed; what is in {} is still there", store.name, store.bucket)
            })
        }
        StoreCommand::Validate(OneStoreArgs { dir, name, json }) => {
            let found = ask(&dir, |client| async move { client.validate_store(&name).await })?;
            print(json.into(), &found, validation_text)?;
            if found.passed { Ok(()) } else { bail!("the store does not work") }
        }
        StoreCommand::Bench { store: OneStoreArgs { dir, name, json }, size, parallel, seconds } => {
            let request = BenchStore { object_bytes: size, parallel, seconds };
            let speed = ask(&dir, |client| async move {
                let work = client.bench_store(&name, &request);
                while_shown(&format!("measuring store {name}"), work).await
            })?;
            print(json.into(), &speed, speed_text)
        }
    }
}

fn set_store(args: StoreSettingsArgs) -> Result<SetStore> {
    let secret_key = match args.secret_stdin {
        true => Some(read_text("-")?.trim_end().to_owned()),
        false => args.secret_key,
    };
    let ca = args.ca.as_deref().map(|path| {
        let pem = env().files.read(path).with_context(|| format!("cannot read {}", path.display()))?;
        String::from_utf8(pem).map_err(|_| anyhow::anyhow!("not in PEM: path={}", path.display()))
    });
    Ok(SetStore {
        protocol: args.protocol,
        hostname: args.hostname,
        port: args.port,
        bucket: args.bucket,
        region: args.region,
        auth_method: args.auth_method,
        access_key_id: args.access_key_id,
        secret_key,
        ca: ca.transpose()?,
        blob_bytes: args.blob_size,
        uploads_max: args.max_up,
        downloads_max: args.max_down,
        removals_max: args.max_remove,
        bandwidth_mbps: args.bandwidth,
        cluster_max: args.max_cluster,
        verify: if args.skip_verification { Verify::Skip } else { Verify::First },
    })
}

fn store_table(stores: &[StoreInfo]) -> Table {
    let mut table = table(&["STORE", "PROTOCOL", "HOST", "BUCKET", "REGION", "ACCESS KEY", "STATE"]);
    for store in stores {
        table.add_row([
            store.name.clone(),
            store.protocol.to_string(),
            format!("{}:{}", store.hostname, store.port),
            store.bucket.clone(),
            store.region.clone(),
            store.access_key_id.clone(),
            if store.problem.is_some() { "unusable" } else { "ready" }.to_owned(),
        ]);
    }
    table
}

fn show(store: &StoreInfo) -> String {
    let limits = store.limits;
    let mut lines = vec![
        ("store", store.name.clone()),
        ("protocol", store.protocol.to_string()),
        ("host", format!("{}:{}", store.hostname, store.port)),
        ("bucket", store.bucket.clone()),
        ("region", store.region.clone()),
        ("signatures", store.auth_method.to_string()),
        ("access key", store.access_key_id.clone()),
        ("certificates", if store.has_ca { "own and the system's" } else { "the system's" }.to_owned()),
        ("blob size", bytes(limits.blob_bytes.into())),
        (
            "under way",
            format!(
                "{} uploads, {} downloads, {} removals at most per node{}",
                limits.uploads_max,
                limits.downloads_max,
                limits.removals_max,
                limits.cluster_max.map_or(String::new(), |most| format!(", {most} of each in all")),
            ),
        ),
        (
            "bandwidth",
            limits.bandwidth_mbps.map_or("not limited".to_owned(), |mbps| format!("{mbps} Mbit/s")),
        ),
        ("added", s3::format_instant(store.created_s)),
    ];
    lines.extend(store.problem.clone().map(|problem| ("problem", problem)));
    lines.iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect()
}

fn speed_text(speed: &StoreSpeed) -> String {
    let size = bytes(speed.plan.object_bytes.into());
    let rate = |name: &str, rate: u64| {
        format!("{name:<13} {}/s, {} of {size} at a time\n", bytes(rate), speed.plan.parallel)
    };
    let micros = speed.round_trip_us;
    rate("PUT", speed.put_bytes_per_s)
        + &rate("GET", speed.get_bytes_per_s)
        + &format!(
            "{:<13} {}.{:03} ms, median of requests for a few bytes\n",
            "round trip",
            micros / 1000,
            micros % 1000
        )
}

fn validation_text(found: &StoreValidationInfo) -> String {
    let mut text = String::new();
    for check in &found.checks {
        match &check.problem {
            None => text.push_str(&format!("ok    {:<6} {}\n", check.verb, check.key)),
            Some(problem) => {
                text.push_str(&format!("FAIL  {:<6} {}: {problem}\n", check.verb, check.key));
                text.push_str(&format!("      {}\n", check.advice.as_deref().unwrap_or_default()));
            }
        }
    }
    text
}
