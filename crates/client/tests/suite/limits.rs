//! Limits on the size of a filesystem.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{World, create, pattern, read_all, run};
use base::{FsError, Ino};
use client::{Client, Limits, Scarce, Shortage};

const FILE_BYTES: usize = 1 << 20;
const FILES: u64 = 16;
/// Room that a filesystem may have left beside full files.
const SPARE: u64 = 4096;

fn limit(world: &World, limits: Limits) {
    world.change(|topology| topology.limits = limits);
}

async fn write(client: &Client, name: &str) -> Result<Ino, FsError> {
    let ino = create(client, name).await;
    client.write(ino, 0, &pattern(7, FILE_BYTES)).await?;
    client.fsync(ino).await.map(|()| ino)
}

async fn remove(client: &Client, ino: Ino, name: &str) {
    client.unlink(Ino::ROOT, name.as_bytes()).await.unwrap();
    client.close_file(ino);
    client.forget(ino, 1);
}

/// The figures of use are known from the next heartbeat on.
async fn shortage_becomes(client: &Client, expected: Option<Shortage>) {
    while client.shortage() != expected {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn check_limit(limits: Limits, of: Scarce) {
    run("4+2", |world| async move {
        let client = world.client().await;
        limit(&world, limits);
        shortage_becomes(&client, None).await;
        let mut files = Vec::new();
        for number in 0..FILES {
            files.push(write(&client, &number.to_string()).await.unwrap());
        }
        shortage_becomes(&client, Some(Shortage { of, left_bytes: SPARE, is_refusing: false })).await;
        assert_eq!(client.statfs().await.unwrap().free_bytes, SPARE);
        assert_eq!(write(&client, "one more").await, Err(FsError::NoSpace));
        shortage_becomes(&client, Some(Shortage { of, left_bytes: SPARE, is_refusing: true })).await;
        for ino in &files {
            assert!(read_all(&client, *ino).await.unwrap() == pattern(7, FILE_BYTES));
        }
        // A refused write takes no space, and a deletion makes room at once.
        remove(&client, files[3], "3").await;
        write(&client, "instead").await.unwrap();
        assert_eq!(write(&client, "two more").await, Err(FsError::NoSpace));
        limit(&world, Limits::default());
        write(&client, "three more").await.unwrap();
        shortage_becomes(&client, None).await;
    });
}

#[test]
fn no_more_is_stored_than_is_provisioned() {
    let provisioned_bytes = Some(FILES * FILE_BYTES as u64 + SPARE);
    check_limit(Limits { provisioned_bytes, ..Limits::default() }, Scarce::Size);
}

#[test]
fn no_more_lies_on_drives_than_the_quota() {
    let ssd_bytes = Some(FILES * FILE_BYTES as u64 + SPARE);
    check_limit(Limits { ssd_bytes, ..Limits::default() }, Scarce::SsdQuota);
}

#[test]
fn clients_that_write_at_the_same_time_share_the_provisioned_size() {
    run("4+2", |world| async move {
        let (one, other) = (world.client().await, world.client().await);
        let provisioned_bytes = Some(FILES * FILE_BYTES as u64);
        limit(&world, Limits { provisioned_bytes, ..Limits::default() });
        let fill = |client: Client, tag: &'static str| async move {
            let mut written = 0;
            while write(&client, &format!("{tag}{written}")).await.is_ok() {
                written += 1;
            }
            written
        };
        let (a, b) = tokio::join!(fill(one.clone(), "a"), fill(other, "b"));
        assert!(a + b >= FILES, "{a} + {b}");
        // Each learns of the other's data with its next heartbeat.
        assert!(one.statfs().await.unwrap().free_bytes == 0);
        assert_eq!(write(&one, "more").await, Err(FsError::NoSpace));
    });
}

#[test]
fn what_is_spared_for_a_loss_stays_free() {
    run("4+2", |world| async move {
        let client = world.client().await;
        // Half of six drives is spared: with 4+2 the other half has room for this many files.
        const FIT: u64 = 16;
        world.drives.iter().for_each(|drive| drive.capacity_bytes.store(8 << 20, Ordering::Relaxed));
        limit(&world, Limits { spare_millionths: 500_000, ..Limits::default() });
        shortage_becomes(&client, None).await;
        assert_eq!(client.statfs().await.unwrap().total_bytes, FIT * FILE_BYTES as u64);
        let mut files = Vec::new();
        let refused = loop {
            match write(&client, &files.len().to_string()).await {
                Ok(ino) => files.push(ino),
                Err(error) => break error,
            }
        };
        assert_eq!((refused, files.len() as u64), (FsError::NoSpace, FIT));
        assert_eq!(client.shortage().map(|shortage| shortage.of), Some(Scarce::Spare));
        for ino in files {
            assert!(read_all(&client, ino).await.unwrap() == pattern(7, FILE_BYTES));
        }
        limit(&world, Limits::default());
        write(&client, "one more").await.unwrap();
        shortage_becomes(&client, None).await;
    });
}
