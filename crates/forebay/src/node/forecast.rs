//! Forecast of the space on drives and in the store for another retention.

use admin::{AdminError, ForecastInfo, ForecastRequest};
use base::env::Env;
use client::Client;
use upkeep::Ages;
use wire::tier::Forecast;

use super::Node;
use super::filesystem_groups::Times;
use super::filesystems::FilesystemEntry;

const SECOND_NS: u64 = 1_000_000_000;

/// A filesystem in a forecast.
struct ForecastInput {
    filesystem: String,
    store: String,
    times: Times,
    client: Client,
    blob_bytes: u32,
    fetched_s: u64,
}

impl ForecastInput {
    /// `None` if the filesystem has no store.
    fn of(entry: &FilesystemEntry, env: &Env) -> Option<Self> {
        let tier = entry.record.tier?;
        Some(Self {
            filesystem: entry.record.name.clone(),
            store: entry.tier.store.clone(),
            times: entry.tier.times(tier),
            client: entry.client.clone(),
            blob_bytes: entry.tier.options(&entry.record, tier).blob_bytes,
            fetched_s: (env.clock.boot_ns() - entry.tier.served_from_ns) / SECOND_NS,
        })
    }

    fn info(&self, forecast: Forecast, retention_s: u64, is_present: bool) -> ForecastInfo {
        ForecastInfo {
            filesystem: self.filesystem.clone(),
            store: self.store.clone(),
            retention_s,
            is_present,
            forecast,
            fetched_bytes: self.client.fetched_bytes(),
            fetched_s: self.fetched_s,
        }
    }
}

impl Node {
    pub(super) async fn tier_forecast_now(
        &self,
        request: ForecastRequest,
    ) -> Result<Vec<ForecastInfo>, AdminError> {
        // Looking at all extents may take long, so the lock is released first.
        let asked: Vec<ForecastInput> = {
            let state = self.state.lock().await;
            state.filesystems.values().filter_map(|entry| ForecastInput::of(entry, &self.env)).collect()
        };
        let now_s = u64::try_from(self.env.clock.wall_ns() / 1_000_000_000).unwrap_or(0);
        let mut infos = Vec::new();
        for of in asked {
            let other = request.retention_s.filter(|other| *other != of.times.retention_s);
            let retentions = [Some(of.times.retention_s), other];
            let mut ages: Vec<Ages> = retentions
                .into_iter()
                .flatten()
                .map(|retention_s| Ages::new(now_s, retention_s, of.times.cue_s))
                .collect();
            let mut after = None;
            loop {
                let (extents, next) = of.client.tier_ages(after).await.map_err(AdminError::failed)?;
                ages.iter_mut().for_each(|ages| extents.iter().for_each(|extent| ages.add(extent)));
                after = next;
                if after.is_none() {
                    break;
                }
            }
            infos.extend(ages.iter().zip(retentions.into_iter().flatten()).map(|(ages, retention_s)| {
                let is_present = retention_s == of.times.retention_s;
                of.info(ages.forecast(of.blob_bytes), retention_s, is_present)
            }));
        }
        Ok(infos)
    }
}
