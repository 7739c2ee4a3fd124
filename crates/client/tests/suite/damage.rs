//! A failed read makes an extent suspect; it is called lost only after proof.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Fault, MemStore, World, create, pattern, read_all, run, run_with_spares};
use base::{FsError, Ino};
use client::{Client, Flaw, PiecePosition, Verdict};
use layout::Rebuilding;
use wire::damage::LossCause;
use wire::meta::{Content, MapPiece};
use wire::tier::Stage;

const LEN: usize = 3 << 20;

/// Writes a file of one extent. Returns where it is.
async fn write_file(client: &Client, name: &str) -> (Ino, PiecePosition, MapPiece) {
    let ino = create(client, name).await;
    client.write(ino, 0, &pattern(1, LEN)).await.unwrap();
    client.fsync(ino).await.unwrap();
    let (position, piece) = client.piece_at(ino, 77).await.unwrap().unwrap();
    (ino, position, piece)
}

/// The shards of an extent that these drives hold.
fn shards_on(world: &World, piece: &MapPiece, drives: &[u32]) -> u32 {
    let extent = piece.content.extent().unwrap();
    let topology = world.topology();
    let members = &topology.map.group(extent.pg).unwrap().members;
    let bits = members.iter().enumerate().filter(|(_, drive)| drives.contains(&drive.0));
    bits.map(|(shard, _)| 1 << shard).sum()
}

#[test]
fn too_few_verified_shards_are_a_proof_if_every_drive_has_answered() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let (ino, _, piece) = write_file(&client, "file").await;
        assert!((0..2).all(|drive| world.drives[drive].rot() > 0));
        assert_eq!(client.examine(&piece).await, Verdict::Readable, "two may go");
        for fault in [Fault::Failed, Fault::Erring] {
            world.drives[2].set(fault);
            assert_eq!(client.examine(&piece).await, Verdict::Unknown, "{fault:?} drives may come back");
        }
        assert_eq!(read_all(&client, ino).await, Err(FsError::Io));
        let suspect = client.take_suspects().remove(0);
        assert_eq!((suspect.content, suspect.at), (piece.content.clone(), Some((ino, 0))));
        world.drives[2].set(Fault::Failed);
        assert!(!client.can_prove(&piece));
        world.drives[2].set(Fault::None);
        assert!(client.can_prove(&piece));
        assert_eq!(client.examine(&piece).await, Verdict::Readable);
        world.drives[2].rot();
        let damaged = shards_on(&world, &piece, &[0, 1, 2]);
        let lost = |damaged, missing| Verdict::Lost(LossCause::Shards { damaged, missing });
        assert_eq!(client.examine(&piece).await, lost(damaged, 0));
        world.drives[3].forget_all();
        let missing = shards_on(&world, &piece, &[3]);
        assert_eq!(client.examine(&piece).await, lost(damaged, missing));
    });
}

#[test]
fn a_drive_that_had_the_position_and_is_away_may_have_the_shard() {
    run_with_spares("1+0", 1, |world| async move {
        let client = world.client().await;
        let (_, _, piece) = write_file(&client, "file").await;
        world.change(|topology| {
            let group = &mut topology.map.groups[0];
            let from = std::mem::replace(&mut group.members[0], base::DriveId(1));
            group.rebuilding = vec![Rebuilding { position: 0, from }];
        });
        world.drives[0].set(Fault::Failed);
        assert_eq!(client.examine(&piece).await, Verdict::Unknown);
        world.drives[0].set(Fault::None);
        assert_eq!(client.examine(&piece).await, Verdict::Readable);
        world.drives[0].forget_all();
        let lost = Verdict::Lost(LossCause::Shards { damaged: 0, missing: 1 });
        assert_eq!(client.examine(&piece).await, lost);
    });
}

#[test]
fn an_owed_shard_is_not_called_damaged() {
    run("4+2", |world| async move {
        let client = world.client().await;
        world.drives[1].set(Fault::Failed);
        let (ino, _, piece) = write_file(&client, "file").await;
        world.drives[1].set(Fault::None);
        let damaged: usize = world.drives[0].rot();
        assert!(damaged > 0 && client.take_damaged().is_empty());
        let mut met = Vec::new();
        for _ in 0..10 {
            assert!(read_all(&client, ino).await.unwrap() == pattern(1, LEN));
            assert_eq!(client.examine(&piece).await, Verdict::Readable);
            met.extend(client.take_damaged());
        }
        let flaw = |drive: u32| move |(entry, _): &&(client::OwedEntry, Flaw)| entry.drive.0 == drive;
        assert!(met.iter().filter(flaw(1)).all(|(_, flaw)| *flaw == Flaw::Missing), "{met:?}");
        assert!(met.iter().filter(flaw(0)).all(|(_, flaw)| *flaw == Flaw::Damaged), "{met:?}");
        assert!(client.take_suspects().is_empty());
    });
}

/// A file that only a blob has.
async fn away_file(world: &Arc<World>, store: &Arc<MemStore>) -> (Client, Ino, MapPiece) {
    let client = world.tiered_client(store).await;
    client.tier_attach().await.unwrap();
    let (ino, _, _) = write_file(&client, "file").await;
    let due = client.tier_due(Stage::Queued, u64::MAX - 1, None).await.unwrap();
    client.upload(due, 4 << 20, None).await.unwrap();
    client.release_by(u64::MAX - 1, u64::MAX).await.unwrap();
    let (_, piece) = client.piece_at(ino, 0).await.unwrap().unwrap();
    assert!(matches!(piece.content, Content::Tiered(..)));
    (world.tiered_client(store).await, ino, piece)
}

#[test]
fn a_blob_is_lost_if_its_store_lacks_it_more_than_once_and_not_while_the_store_is_down() {
    run("4+2", |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, ino, piece) = away_file(&world, &store).await;
        let Content::Tiered(_, place) = &piece.content else { unreachable!() };
        let (serial, key) = (place.serial, store.keys().remove(0));
        assert_eq!(client.examine(&piece).await, Verdict::Readable);
        store.down.store(true, Ordering::SeqCst);
        let cold = world.tiered_client(&store).await;
        assert_eq!(cold.examine(&piece).await, Verdict::Unknown);
        store.down.store(false, Ordering::SeqCst);
        let whole = store.objects.lock().unwrap().remove(&key).unwrap();
        assert_eq!(cold.examine(&piece).await, Verdict::Lost(LossCause::BlobMissing { serial }));
        assert_eq!(read_all(&cold, ino).await, Err(FsError::Io));
        assert_eq!(cold.take_suspects().remove(0).at, Some((ino, 0)));
        // A blob that appears a moment later was not lost.
        let late = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            store.objects.lock().unwrap().insert(key.clone(), whole.clone());
        };
        let (verdict, ()) = tokio::join!(cold.examine(&piece), late);
        assert_eq!(verdict, Verdict::Readable);
    });
}

#[test]
fn a_blob_is_damaged_in_its_front_where_a_piece_lies_or_behind_its_end() {
    let flip = |at: usize| {
        move |blob: &[u8]| {
            let mut wrong = blob.to_vec();
            wrong[at] ^= 1;
            wrong
        }
    };
    check_damage(flip(20), true);
    check_damage(flip(200_000), true);
    check_damage(|blob| blob.to_vec(), false);
    check_damage(|blob| [&blob[..200_000], &vec![0; blob.len() - 200_000]].concat(), true);
}

fn check_damage(damage: impl Fn(&[u8]) -> Vec<u8> + 'static, is_lost: bool) {
    run("4+2", move |world| async move {
        let store = Arc::new(MemStore::default());
        let (client, _, piece) = away_file(&world, &store).await;
        let Content::Tiered(_, place) = &piece.content else { unreachable!() };
        for blob in store.objects.lock().unwrap().values_mut() {
            *blob = damage(blob).into();
        }
        let lost = Verdict::Lost(LossCause::BlobDamaged { serial: place.serial });
        assert_eq!(client.examine(&piece).await, if is_lost { lost } else { Verdict::Readable });
    });
}

#[test]
fn a_loss_is_noted_listed_and_settled_and_leads_to_a_path() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let (ino, position, piece) = write_file(&client, "file").await;
        assert_eq!(client.losses().await.unwrap().0, []);
        let cause = LossCause::Shards { damaged: 7, missing: 0 };
        assert!(client.note_loss(position, piece.clone(), ino, cause).await.unwrap());
        let (losses, sums) = client.losses().await.unwrap();
        assert_eq!((losses.len(), losses[0].piece.clone(), losses[0].ino), (1, Some(piece), ino));
        assert_eq!((sums.pieces, sums.unrepairable), (1, 3));
        assert_eq!(client.files_of(vec![position.map], Ino(0)).await.unwrap().0, [(position.map, ino)]);
        assert_eq!(client.path_of(ino).await.unwrap().unwrap(), b"/file");
        assert!(client.leads_to(b"/file", ino).await && !client.leads_to(b"/other", ino).await);
        client.settle_losses(vec![position]).await.unwrap();
        assert_eq!(client.losses().await.unwrap().1.pieces, 0);
    });
}
