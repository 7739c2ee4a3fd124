//! New data near to where it is written, and reads of the nearest copy.

use std::sync::atomic::Ordering;

use crate::common::{Fault, World, create, pattern, read_all, run_with_spares};
use base::{DriveId, Ino, PgId};
use client::Client;
use layout::PlacementGroup;

const FILE_BYTES: usize = 4 << 20;
/// Four drives, each in a node of its own, and four groups that each begin at another.
const GROUPS: [[u32; 2]; 4] = [[0, 1], [1, 2], [2, 3], [3, 0]];

/// The client is on this node.
fn stand(world: &World, node: u32, writes_near: bool) {
    world.change(|topology| {
        let group = |(id, members): (usize, &[u32; 2])| {
            PlacementGroup::new(PgId(id as u32), members.iter().copied().map(DriveId).collect())
        };
        topology.map.groups = GROUPS.iter().enumerate().map(group).collect();
        topology.groups = topology.map.groups.iter().map(|group| group.id).collect();
        let here = topology.map.drive(DriveId(node)).unwrap().place;
        *topology = topology.clone().seen_from(Some(here), writes_near);
    });
}

async fn write(client: &Client, name: &str) -> Ino {
    let ino = create(client, name).await;
    client.write(ino, 0, &pattern(7, FILE_BYTES)).await.unwrap();
    client.fsync(ino).await.unwrap();
    ino
}

fn shards(world: &World) -> Vec<usize> {
    world.drives.iter().map(|drive| drive.shards()).collect()
}

fn gets(world: &World) -> Vec<u64> {
    world.drives.iter().map(|drive| drive.gets.swap(0, Ordering::Relaxed)).collect()
}

#[test]
fn local_data_goes_to_this_node_first_and_elsewhere_if_it_must() {
    run_with_spares("r2", 2, |world| async move {
        stand(&world, 2, true);
        let client = world.client().await;
        write(&client, "here").await;
        let here = shards(&world);
        assert!(here[2] >= 4 && here[2] == here[3] && here[0] + here[1] == 0, "{here:?}");
        // Its fullest drive has less than a quarter of the room of others.
        world.drives[3].capacity_bytes.store(200 << 20, Ordering::Relaxed);
        write(&client, "full").await;
        let full = shards(&world);
        assert!(full[0] > 0 && full[1] > 0, "{full:?}");
        world.drives[3].capacity_bytes.store(1 << 30, Ordering::Relaxed);
        // What stays free for a loss is no room: of each drive, 15 MiB are left.
        world.change(|topology| topology.limits.spare_millionths = 985_000);
        for at in 0..5 {
            write(&client, &format!("spare {at}")).await;
        }
        let used = world.drives[3].used_bytes();
        assert!(used <= 21 << 20, "{used} bytes of 24 MiB");
        world.change(|topology| topology.limits.spare_millionths = 0);
        let full = shards(&world);
        // One that fails each request, and looks well.
        world.drives[3].set(Fault::Erring);
        write(&client, "erring").await;
        let erring = shards(&world);
        assert!(erring[3] == full[3], "{erring:?} {full:?}");
        // One that is away.
        world.drives[3].set(Fault::Failed);
        let name = |at: usize| format!("away {at}");
        for at in 0..4 {
            write(&client, &name(at)).await;
        }
        let away = shards(&world);
        assert!(away[0] > full[0] && away[1] > full[1] && away[3] == full[3], "{away:?}");
    });
}

#[test]
fn spread_data_goes_to_all_drives() {
    run_with_spares("r2", 2, |world| async move {
        stand(&world, 2, false);
        let client = world.client().await;
        for at in 0..4 {
            write(&client, &format!("file {at}")).await;
        }
        assert!(shards(&world).iter().all(|shards| *shards > 0), "{:?}", shards(&world));
    });
}

#[test]
fn copies_are_read_where_they_are_nearest_while_they_can_be() {
    run_with_spares("r2", 2, |world| async move {
        stand(&world, 2, true);
        let writer = world.client().await;
        let ino = write(&writer, "file").await;
        // All of it is on drives 2 and 3.
        stand(&world, 3, false);
        let reader = world.client().await;
        gets(&world);
        assert!(read_all(&reader, ino).await.unwrap() == pattern(7, FILE_BYTES));
        let near = gets(&world);
        assert!(near[3] > 0 && near[2] == 0, "{near:?}");
        world.drives[3].set(Fault::Failed);
        let other = world.client().await;
        assert!(read_all(&other, ino).await.unwrap() == pattern(7, FILE_BYTES));
        assert!(gets(&world)[2] > 0);
        // To clients on a node with neither, both serve.
        world.drives[3].set(Fault::None);
        stand(&world, 0, false);
        for _ in 0..12 {
            let third = world.client().await;
            assert!(read_all(&third, ino).await.unwrap() == pattern(7, FILE_BYTES));
        }
        let both = gets(&world);
        assert!(both[2] > 0 && both[3] > 0, "{both:?}");
    });
}

#[test]
fn packed_data_stays_near_to_where_it_was_written() {
    run_with_spares("r2", 2, |world| async move {
        stand(&world, 1, true);
        let writer = world.client().await;
        for at in 0..20u64 {
            let ino = create(&writer, &format!("small {at}")).await;
            writer.write(ino, 0, &pattern(at, 30_000)).await.unwrap();
            writer.fsync(ino).await.unwrap();
        }
        // The packer is at another node.
        stand(&world, 3, true);
        let packer = world.client().await;
        let (entries, _) = packer.scan_map(None).await.unwrap();
        assert!(packer.pack(entries).await.unwrap().moved_bytes >= 600_000);
        let held = shards(&world);
        assert!(held[1] >= 21 && held[1] == held[2] && held[0] + held[3] == 0, "{held:?}");
    });
}
