//! Faults while a node works.

use std::sync::Arc;
use std::time::Duration;

use base::DriveId;
use layout::DriveState;
use wire::drive::{DriveService, ShardKey};

use crate::disks::SimDrive;
use crate::node::{Drives, LEDGER, drive_path, log_dir};
use crate::world::World;

/// Injects faults at random times, until it is aborted. At most one drive at a time is away or damaged.
pub(crate) async fn inject(world: Arc<World>, drives: Drives, boot: u64) {
    let dice = world.dice(0xfa_0000 + (boot << 32));
    let scenario = world.scenario.clone();
    let victim = scenario.victim();
    loop {
        tokio::time::sleep(Duration::from_millis(20 + dice.below(3000))).await;
        let number = dice.below(u64::from(scenario.drives)) as u32;
        match dice.below(5) {
            0 if scenario.drives_die => {
                let Some(drive) = drives.get(&victim) else { continue };
                drive.set_dead(true);
                tokio::time::sleep(Duration::from_millis(dice.below(20_000))).await;
                drive.set_dead(false);
            }
            1 if scenario.drives_slow => {
                let Some(drive) = drives.get(&number) else { continue };
                drive.set_slow(1 + dice.below(2_000));
                tokio::time::sleep(Duration::from_millis(dice.below(5_000))).await;
                drive.set_slow(0);
            }
            2 if scenario.bits_flip => flip_bits(&world, victim, dice.below(u64::MAX)),
            3 if scenario.syncs_fail && dice.once_in(4) => {
                world.promises().hurt_drives.insert(victim);
                world.trace.event(format_args!("sync of drive {victim} will fail"));
                world.files.fail_sync_of(&drive_path(victim), dice.below(3));
                if scenario.meta_dirs > 1 {
                    fail_log_copy(&world, dice.below(3));
                }
            }
            4 if scenario.forgets && world.cluster().state(DriveId(victim)) == DriveState::Up => {
                let Some(drive) = drives.get(&victim) else { continue };
                forget_shard(&world, drive, dice.below(u64::MAX)).await;
            }
            _ => {}
        }
    }
}

/// Makes a drive lose one of its shards.
async fn forget_shard(world: &World, drive: &SimDrive, random: u64) {
    let all = drive.list(Some(ShardKey::first_of(LEDGER)), usize::MAX).await.unwrap_or_default();
    if let Some(entry) = all.get((random % all.len().max(1) as u64) as usize) {
        world.trace.event(format_args!("{:?} is lost without notice", entry.key));
        let _ = drive.delete(vec![entry.key].into()).await;
    }
}

/// Makes all drives answer, and without delay.
pub(crate) fn mend(drives: &Drives) {
    for drive in drives.values() {
        drive.set_dead(false);
        drive.set_slow(0);
    }
}

fn flip_bits(world: &World, drive: u32, random: u64) {
    let pages = world.files.used_pages(&drive_path(drive));
    // Superblocks are written twice; without this filter both could be damaged.
    let pages: Vec<u64> = pages.into_iter().filter(|page| *page >= 256).collect();
    if pages.is_empty() {
        return;
    }
    let byte = pages[(random % pages.len() as u64) as usize] * 4096 + (random >> 40) % 4096;
    world.promises().hurt_drives.insert(drive);
    world.trace.event(format_args!("drive {drive} bit flips at byte {byte}"));
    world.files.flip_bit(&drive_path(drive), byte, (random >> 33) as u8);
}

/// Makes the next sync of one copy of the log fail, while the other copies go on.
fn fail_log_copy(world: &World, successes: u64) {
    let newest = world.env().files.list(&log_dir(0)).unwrap_or_default().into_iter().max();
    if let Some(path) = newest {
        world.trace.event(format_args!("sync of {} will fail", path.display()));
        world.files.fail_sync_of(&path, successes);
    }
}
