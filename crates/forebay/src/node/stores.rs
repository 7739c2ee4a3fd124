//! Object stores: settings in the control ledger, and checks of stores.

use std::sync::Arc;

use ::s3::{Accounts, Purpose};
use admin::{AdminError, BenchStore, SetStore, StoreControl, StoreInfo, StoreValidationInfo, Verify};
use base::env::Env;
use control::{StoreRecord, StoresRecord};
use tokio::runtime::Handle;
use upkeep::{S3Store, StoreSettings, StoreSettingsError};
use wire::BoxFuture;
use wire::store::{SpeedPlan, StoreAddress, StoreAuth, StoreCheck, StoreLimits, StoreProtocol, StoreSpeed};

use super::tiers::plan_uploads;
use super::users::check_name;
use super::{Network, Node};

/// Limit of object stores.
const STORES_MAX: usize = 2048;
const DEFAULT_REGION: &str = "us-east-1";
/// Duration of a speed test in seconds, each way: default and maximum.
const SPEED_S: u16 = 5;
const SPEED_S_MAX: u16 = 40;
/// Most requests under way in a speed test.
const SPEED_PARALLEL_MAX: u64 = 64;
const SECOND_NS: i64 = 1_000_000_000;
const SECRET_LOST: &str =
    "its secret is sealed with another node.key: give it again with `forebay store update`";

/// The context that a sealed secret is bound to: an attacker who can change records cannot have it sent to another
/// host.
fn seal_context(record: &StoreRecord) -> Vec<u8> {
    let StoreAddress { host, port, access_key, .. } = &record.address;
    format!("{} {host} {port} {access_key}", record.id).into_bytes()
}

/// The old settings with the requested changes.
fn changed(old: StoreAddress, settings: &SetStore) -> StoreAddress {
    let (bucket, prefix) = match &settings.bucket {
        None => (old.bucket, old.prefix),
        Some(bucket) => {
            let (bucket, prefix) = bucket.split_once('/').unwrap_or((bucket, ""));
            (bucket.to_owned(), prefix.trim_end_matches('/').to_owned())
        }
    };
    let protocol = settings.protocol.unwrap_or(old.protocol);
    // A default port changes with the protocol.
    let usual = old.port == old.protocol.default_port();
    let port = if usual { protocol.default_port() } else { old.port };
    let ca = settings.ca.clone().map_or(old.ca, |ca| Some(ca).filter(|ca| !ca.trim().is_empty()));
    StoreAddress {
        protocol,
        host: settings.hostname.clone().unwrap_or(old.host),
        port: settings.port.unwrap_or(port),
        bucket,
        prefix,
        region: settings.region.clone().unwrap_or(old.region),
        auth: settings.auth_method.unwrap_or(old.auth),
        access_key: settings.access_key_id.clone().unwrap_or(old.access_key),
        ca,
        limits: StoreLimits {
            blob_bytes: settings.blob_bytes.unwrap_or(old.limits.blob_bytes),
            uploads_max: settings.uploads_max.unwrap_or(old.limits.uploads_max),
            downloads_max: settings.downloads_max.unwrap_or(old.limits.downloads_max),
            removals_max: settings.removals_max.unwrap_or(old.limits.removals_max),
            bandwidth_mbps: settings.bandwidth_mbps.or(old.limits.bandwidth_mbps).filter(|mbps| *mbps > 0),
            cluster_max: settings.cluster_max.or(old.limits.cluster_max).filter(|most| *most > 0),
        },
    }
}

/// The part of an address that decides which objects are found.
fn place(address: &StoreAddress) -> (&str, u16, &str, &str) {
    (&address.host, address.port, &address.bucket, &address.prefix)
}

/// A store with a name and default settings.
fn blank(id: u32, name: &str, created_ns: i64) -> StoreRecord {
    let address = StoreAddress {
        protocol: StoreProtocol::Https,
        host: String::new(),
        port: StoreProtocol::Https.default_port(),
        bucket: String::new(),
        prefix: String::new(),
        region: DEFAULT_REGION.to_owned(),
        auth: StoreAuth::V4,
        access_key: String::new(),
        ca: None,
        limits: StoreLimits::default(),
    };
    StoreRecord { id, name: name.to_owned(), address, sealed_secret: String::new(), created_ns }
}

/// The plan of a speed test: within the memory that tiering has.
fn speed_plan(memory_bytes: u64, limits: StoreLimits, request: BenchStore) -> Result<SpeedPlan, AdminError> {
    let (blob_bytes, uploads) = plan_uploads(memory_bytes, limits, 0);
    let usual = u16::try_from(uploads).unwrap_or(u16::MAX);
    let object_bytes = request.object_bytes.unwrap_or(blob_bytes);
    let (parallel, seconds) = (request.parallel.unwrap_or(usual), request.seconds.unwrap_or(SPEED_S));
    if object_bytes == 0 || u64::from(object_bytes) > memory_bytes {
        return Err(AdminError::invalid(format!(
            "an object must have 1 byte to {memory_bytes}, as a blob here: size={object_bytes}"
        )));
    }
    let most = (memory_bytes / u64::from(object_bytes)).clamp(1, SPEED_PARALLEL_MAX);
    if parallel == 0 || u64::from(parallel) > most {
        return Err(AdminError::invalid(format!(
            "there is memory for 1 to {most} objects of {object_bytes} bytes at a time: parallel={parallel}"
        )));
    }
    if !(1..=SPEED_S_MAX).contains(&seconds) {
        return Err(AdminError::invalid(format!("must be 1 to {SPEED_S_MAX}: seconds={seconds}")));
    }
    Ok(SpeedPlan { object_bytes, parallel, seconds })
}

fn no_store(name: &str) -> AdminError {
    AdminError::not_found(format!("no such store: name={name} (see `forebay store list`)"))
}

fn validation_info(checks: Vec<StoreCheck>) -> StoreValidationInfo {
    StoreValidationInfo { passed: checks.iter().all(|check| check.problem.is_none()), checks }
}

/// The refusal of a store that failed its check.
fn refusal(validation: &StoreValidationInfo) -> AdminError {
    let failed = validation.checks.iter().find(|check| check.problem.is_some());
    let Some(failed) = failed else { return AdminError::failed("the store was not tried") };
    AdminError::invalid(format!(
        "the store does not work: {} {}: {} ({}; --skip-verification keeps the settings all the same)",
        failed.verb,
        failed.key,
        failed.problem.as_deref().unwrap_or_default(),
        failed.advice.as_deref().unwrap_or_default(),
    ))
}

/// The settings of a store for one of `nodes` nodes.
fn settings_of(
    record: &StoreRecord,
    secret_key: String,
    nodes: u16,
) -> Result<StoreSettings, StoreSettingsError> {
    let mut settings = StoreSettings { address: record.address.clone(), secret_key };
    // Invalid settings are refused with the values as requested.
    settings.check()?;
    settings.address.limits = record.address.limits.of_node(nodes);
    Ok(settings)
}

fn secret(accounts: &Accounts, record: &StoreRecord) -> Option<String> {
    let sealed = ::s3::from_base64(&record.sealed_secret)?;
    let opened = accounts.node_key().open(Purpose::StoreSecret, &seal_context(record), &sealed)?;
    String::from_utf8(opened).ok()
}

/// The store of a record as this process uses it, or why it cannot.
pub(crate) fn reach_store(
    (env, runtime): (&Env, &Handle),
    network: &Network,
    accounts: &Accounts,
    record: &StoreRecord,
) -> Result<Arc<S3Store>, String> {
    let secret_key = secret(accounts, record).ok_or_else(|| SECRET_LOST.to_owned())?;
    let settings =
        settings_of(record, secret_key, network.nodes_count()).map_err(|error| error.to_string())?;
    network.stores.of(env, runtime, settings).map_err(|error| error.to_string())
}

impl Node {
    /// The store of a record as filesystems use it, or why they cannot.
    pub(super) fn reach(&self, record: &StoreRecord) -> Result<Arc<S3Store>, String> {
        reach_store((&self.env, &self.runtime), &self.others.network, &self.accounts, record)
    }

    /// This node's share of the limits of a store.
    pub(super) fn limits_here(&self, address: &StoreAddress) -> StoreLimits {
        address.limits.of_node(self.others.network.nodes_count())
    }

    fn store_records(&self) -> Result<Vec<StoreRecord>, AdminError> {
        self.view()?.stores().map_err(AdminError::failed)
    }

    pub(super) fn store_record(&self, name: &str) -> Result<StoreRecord, AdminError> {
        self.store_records()?.into_iter().find(|record| record.name == name).ok_or_else(|| no_store(name))
    }

    fn store_info(&self, record: &StoreRecord) -> StoreInfo {
        let address = &record.address;
        let slash = if address.prefix.is_empty() { "" } else { "/" };
        StoreInfo {
            name: record.name.clone(),
            id: record.id,
            protocol: address.protocol,
            hostname: address.host.clone(),
            port: address.port,
            bucket: format!("{}{slash}{}", address.bucket, address.prefix),
            region: address.region.clone(),
            auth_method: address.auth,
            access_key_id: address.access_key.clone(),
            has_ca: address.ca.is_some(),
            limits: address.limits,
            created_s: record.created_ns / SECOND_NS,
            problem: secret(&self.accounts, record).is_none().then(|| SECRET_LOST.to_owned()),
        }
    }

    /// A record with its changes, its secret, and the store that they open. The secret must be given again if it would
    /// otherwise go to another host.
    fn prepare(
        &self,
        old: StoreRecord,
        settings: &SetStore,
    ) -> Result<(StoreRecord, Arc<S3Store>), AdminError> {
        let known = secret(&self.accounts, &old);
        let mut record = StoreRecord { address: changed(old.address, settings), ..old };
        let secret_key = settings.secret_key.clone().or(known).ok_or_else(|| {
            AdminError::invalid("the secret key is needed: use --secret-key or --secret-stdin")
        })?;
        let sealed = self.accounts.node_key().seal(
            Purpose::StoreSecret,
            &seal_context(&record),
            secret_key.as_bytes(),
        );
        record.sealed_secret = ::s3::to_base64(&sealed);
        let store = settings_of(&record, secret_key, self.others.network.nodes_count())
            .and_then(|settings| S3Store::new(self.env.clone(), settings));
        let store = store.map_err(|error| AdminError::invalid(error.to_string()))?;
        Ok((record, store))
    }

    async fn verify(&self, store: &S3Store, verify: Verify) -> Result<(), AdminError> {
        if verify == Verify::Skip {
            return Ok(());
        }
        let validation = validation_info(store.validate(self.cluster, self.here().0).await);
        if validation.passed { Ok(()) } else { Err(refusal(&validation)) }
    }

    async fn stores_now(&self) -> Result<Vec<StoreInfo>, AdminError> {
        Ok(self.store_records()?.iter().map(|record| self.store_info(record)).collect())
    }

    async fn add_store_now(&self, name: &str, settings: SetStore) -> Result<StoreInfo, AdminError> {
        check_name("store", name)?;
        let _one_at_a_time = self.stores_lock.lock().await;
        let records = self.store_records()?;
        if records.iter().any(|record| record.name == name) {
            return Err(AdminError::conflict(format!("store exists: name={name}")));
        }
        if records.len() >= STORES_MAX {
            return Err(AdminError::conflict(format!("there are {STORES_MAX} stores, no more are possible")));
        }
        let view = self.view()?;
        let counter = view.stores_record().map_err(AdminError::failed)?;
        let id = counter.map_or(1, |counter| counter.next_store);
        let (record, store) = self.prepare(blank(id, name, self.env.clock.wall_ns()), &settings)?;
        self.verify(&store, settings.verify).await?;
        let mut change = view.change();
        change.stores(&StoresRecord { next_store: id + 1 }).store(&record);
        self.control.commit(change).await.map_err(AdminError::failed)?;
        Ok(self.store_info(&record))
    }

    async fn update_store_now(&self, name: &str, settings: SetStore) -> Result<StoreInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let old = self.store_record(name)?;
        let (record, store) = self.prepare(old.clone(), &settings)?;
        self.verify(&store, settings.verify).await?;
        if place(&old.address) == place(&record.address) {
            self.change_store(&record).await?;
        } else {
            self.check_has_no_backups(&record)?;
            self.move_store(&record, store).await?;
        }
        Ok(self.store_info(&record))
    }

    async fn remove_store_now(&self, name: &str) -> Result<StoreInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let view = self.view()?;
        let record = self.store_record(name)?;
        self.check_unused(&record)?;
        let mut change = view.change();
        change.remove_store(record.id);
        self.control.commit(change).await.map_err(AdminError::failed)?;
        Ok(self.store_info(&record))
    }

    async fn bench_store_now(&self, name: &str, request: BenchStore) -> Result<StoreSpeed, AdminError> {
        let record = self.store_record(name)?;
        let plan = speed_plan(self.memory.blobs_bytes, self.limits_here(&record.address), request)?;
        let (_, store) = self.prepare(record, &SetStore::default())?;
        store
            .speed(self.cluster, self.here().0, plan)
            .await
            .map_err(|error| AdminError::failed(format!("store {name}: {error}")))
    }

    async fn try_store_now(&self, name: &str, settings: SetStore) -> Result<StoreValidationInfo, AdminError> {
        let old = match self.store_record(name) {
            Ok(record) => record,
            Err(_) => blank(0, name, 0),
        };
        let (_, store) = self.prepare(old, &settings)?;
        Ok(validation_info(store.validate(self.cluster, self.here().0).await))
    }
}

impl StoreControl for Node {
    fn stores(&self) -> BoxFuture<'_, Result<Vec<StoreInfo>, AdminError>> {
        Box::pin(self.stores_now())
    }

    fn add_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>> {
        Box::pin(async move { self.add_store_now(&name, settings).await })
    }

    fn update_store(&self, name: String, settings: SetStore) -> BoxFuture<'_, Result<StoreInfo, AdminError>> {
        Box::pin(async move { self.update_store_now(&name, settings).await })
    }

    fn remove_store(&self, name: String) -> BoxFuture<'_, Result<StoreInfo, AdminError>> {
        Box::pin(async move { self.remove_store_now(&name).await })
    }

    fn validate_store(&self, name: String) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>> {
        Box::pin(async move {
            self.store_record(&name)?;
            self.try_store_now(&name, SetStore::default()).await
        })
    }

    fn bench_store(
        &self,
        name: String,
        request: BenchStore,
    ) -> BoxFuture<'_, Result<StoreSpeed, AdminError>> {
        Box::pin(async move { self.bench_store_now(&name, request).await })
    }

    fn try_store(
        &self,
        name: String,
        settings: SetStore,
    ) -> BoxFuture<'_, Result<StoreValidationInfo, AdminError>> {
        Box::pin(async move { self.try_store_now(&name, settings).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(change: fn(&mut SetStore)) -> SetStore {
        let mut settings = SetStore::default();
        change(&mut settings);
        settings
    }

    #[test]
    fn what_is_not_said_stays_as_it_was() {
        let first = set(|set| {
            set.hostname = Some("s3.example.org".to_owned());
            set.bucket = Some("Bucket/a/b/".to_owned());
            set.auth_method = Some(StoreAuth::V2);
            set.blob_bytes = Some(8 << 20);
        });
        let address = changed(blank(1, "cold", 5).address, &first);
        assert_eq!((address.bucket.as_str(), address.prefix.as_str()), ("Bucket", "a/b"));
        assert_eq!((address.port, address.auth, address.limits.blob_bytes), (443, StoreAuth::V2, 8 << 20));
        assert_eq!(changed(address.clone(), &SetStore::default()), address);
        let region = changed(address.clone(), &set(|set| set.region = Some("eu-1".to_owned())));
        assert_eq!(region, StoreAddress { region: "eu-1".to_owned(), ..address });
    }

    #[test]
    fn speed_is_measured_in_the_memory_of_tiering() {
        let plan = |request| speed_plan(128 << 20, StoreLimits::default(), request);
        let usual = plan(BenchStore::default()).unwrap();
        assert_eq!(usual, SpeedPlan { object_bytes: 64 << 20, parallel: 2, seconds: 5 });
        let small = BenchStore { object_bytes: Some(1), parallel: Some(64), seconds: Some(1) };
        assert_eq!(plan(small).unwrap().parallel, 64);
        for wrong in [
            BenchStore { object_bytes: Some(0), ..small },
            BenchStore { object_bytes: Some(1 << 30), ..small },
            BenchStore { parallel: Some(0), ..small },
            BenchStore { parallel: Some(65), ..small },
            BenchStore { object_bytes: Some(64 << 20), parallel: Some(3), ..small },
            BenchStore { seconds: Some(0), ..small },
            BenchStore { seconds: Some(41), ..small },
        ] {
            assert!(plan(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_port_follows_the_protocol_unless_it_was_chosen() {
        let http = set(|set| set.protocol = Some(StoreProtocol::Http));
        assert_eq!(changed(blank(1, "cold", 0).address, &http).port, 80);
        let chosen = changed(blank(1, "cold", 0).address, &set(|set| set.port = Some(9000)));
        assert_eq!(changed(chosen, &http).port, 9000);
    }
}
