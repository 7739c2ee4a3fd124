//! Client, owner and drives in processes of their own, as far as they can tell: every message travels over socket pairs.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::Env;
use base::{ClusterId, DriveId, DriveUuid, FsError, Ino, LedgerId};
use client::{Caller, Client, OpenIntent, Reach, RenameMode, SetAttr, Topology};
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate};
use tokio::sync::{Notify, watch};
use wire::drive::DriveService;
use wire::link::{Connection, Dial, Peer, PeerOptions, RemoteDrive, RemoteOwner, Server, Services, Trust};
use wire::meta::MetaService;
use wire::rights::{ProofKey, Rights, Squash};

use crate::common::{LEDGER, World, create, find, new_file, pattern, read_all, run};

const CLUSTER: ClusterId = ClusterId([7; 16]);

/// A drive in a file.
fn drive_in(env: &Env, dir: &std::path::Path, id: u32) -> Arc<Drive> {
    let path = dir.join(format!("drive-{id}"));
    let options = FormatOptions {
        cluster: CLUSTER,
        uuid: DriveUuid([id as u8; 16]),
        capacity_bytes: Some(256 << 20),
        segment_bytes: Some(8 << 20),
        existing: Existing::Keep,
        preallocate: Preallocate::Reserve,
    };
    Drive::format(env, &path, &options).unwrap();
    Drive::open(env, DriveId(id), &path, &OpenOptions::new(CLUSTER)).unwrap()
}

/// A machine with an owner and drives. Its connections can be broken.
#[derive(Clone)]
struct Machine {
    env: Env,
    server: Arc<Mutex<Arc<Server>>>,
    broken: Arc<Notify>,
    is_away: Arc<AtomicBool>,
    drives: BTreeMap<DriveId, Arc<dyn DriveService>>,
}

impl Machine {
    fn new(world: &World, dir: &std::path::Path) -> Self {
        let env = Env::real();
        let drives: BTreeMap<_, _> = (0..world.drives.len() as u32)
            .map(|id| (DriveId(id), drive_in(&env, dir, id) as Arc<dyn DriveService>))
            .collect();
        let server = Self::server(&env, &drives, 1, world.owner.clone());
        Self {
            env,
            server: Arc::new(Mutex::new(server)),
            broken: Arc::default(),
            is_away: Arc::default(),
            drives,
        }
    }

    fn server(
        env: &Env,
        drives: &BTreeMap<DriveId, Arc<dyn DriveService>>,
        opened: u64,
        owner: Arc<dyn MetaService>,
    ) -> Arc<Server> {
        Server::new(
            env,
            Services {
                owners: BTreeMap::from([(LEDGER, (opened, owner))]),
                drives: drives.clone(),
                proofs: Some(ProofKey::of(b"secret")),
                ..Services::default()
            },
        )
    }

    /// The machine opens its ledger anew.
    fn serve(&self, opened: u64, owner: Arc<dyn MetaService>) {
        *self.server.lock().unwrap() = Self::server(&self.env, &self.drives, opened, owner);
        self.is_away.store(false, Ordering::Relaxed);
        self.break_connections();
    }

    /// The machine cannot be reached until it serves again.
    fn leave(&self) {
        self.is_away.store(true, Ordering::Relaxed);
        self.break_connections();
    }

    fn break_connections(&self) {
        self.broken.notify_waiters();
    }

    fn dial(&self, trust: Trust) -> Dial {
        let machine = self.clone();
        Arc::new(move || {
            let (machine, trust) = (machine.clone(), trust.clone());
            Box::pin(async move {
                if machine.is_away.load(Ordering::Relaxed) {
                    return Err(std::io::ErrorKind::ConnectionRefused.into());
                }
                let (here, there) = UnixStream::pair()?;
                let (here, there) = (Connection::local(here)?, Connection::local(there)?);
                let server = machine.server.lock().unwrap().clone();
                tokio::spawn(async move {
                    tokio::select! {
                        _ = server.serve(there, trust) => {}
                        () = machine.broken.notified() => {}
                    }
                });
                Ok(here)
            })
        })
    }

    /// A client on another machine.
    async fn client(&self, world: &World) -> Client {
        self.client_trusted(world, Trust::Full).await
    }

    async fn client_trusted(&self, world: &World, trust: Trust) -> Client {
        let options = PeerOptions {
            env: self.env.clone(),
            runtime: tokio::runtime::Handle::current(),
            dial: self.dial(trust),
            data_connections: 2,
            proofs: Arc::default(),
        };
        let peer = Peer::new(options);
        let mut topology = Topology::clone(&world.topology());
        for id in self.drives.keys() {
            topology.drives.insert(*id, RemoteDrive::new(&peer, *id).await);
        }
        let owner = RemoteOwner::new(&peer, LEDGER);
        let reach = Reach::hard(peer.contact());
        let (publish, seat) = watch::channel(owner.clone() as Arc<dyn MetaService>);
        tokio::spawn(follow(peer, owner, publish));
        let (_, topology) = watch::channel(Arc::new(topology));
        world.client_elsewhere(seat, topology, reach).await
    }
}

/// Tells a client which owner to ask.
async fn follow(peer: Arc<Peer>, mut owner: Arc<RemoteOwner>, publish: watch::Sender<Arc<dyn MetaService>>) {
    while !publish.is_closed() {
        owner.lost().await;
        owner = RemoteOwner::new(&peer, LEDGER);
        publish.send_replace(owner.clone());
    }
}

#[test]
fn clients_on_other_machines_share_a_filesystem_over_connections_that_break() {
    run("2+1", |world: Arc<World>| async move {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::new(&world, dir.path());
        let (one, two) = (machine.client(&world).await, machine.client(&world).await);
        let busy = Arc::new(AtomicBool::new(true));
        let breaker = {
            let (machine, busy) = (machine.clone(), busy.clone());
            tokio::spawn(async move {
                while busy.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    machine.break_connections();
                }
            })
        };
        let large = create(&one, "large").await;
        one.write(large, 0, &pattern(1, 3_000_000)).await.unwrap();
        for round in 0..400 {
            let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
            let ino = create(writer, &format!("file {round}")).await;
            writer.write(ino, 0, &pattern(round, 20_000 + round as usize)).await.unwrap();
            // The other client asks for what this one holds under a lease.
            let found = find(reader, &format!("file {round}")).await.unwrap();
            assert_eq!((found.ino, found.size), (ino, 20_000 + round));
            assert!(
                read_all(reader, ino).await.unwrap() == pattern(round, 20_000 + round as usize),
                "round {round}"
            );
            writer.close_file(ino);
            if round % 7 == 0 {
                let old = format!("file {round}");
                let (from, to) = ((Ino::ROOT, old.as_bytes()), (Ino::ROOT, b"moved".as_slice()));
                writer.rename(from, to, RenameMode::Replace).await.unwrap();
                assert!(find(reader, &format!("file {round}")).await.is_err());
            }
        }
        assert!(read_all(&two, large).await.unwrap() == pattern(1, 3_000_000));
        busy.store(false, Ordering::Relaxed);
        breaker.await.unwrap();
        assert_eq!(
            world.drives.iter().map(|drive| drive.used_bytes()).sum::<u64>(),
            0,
            "real drives have the data"
        );
    });
}

/// A client that is no node.
fn client_of(ledger: LedgerId) -> Trust {
    let (ledgers, filesystems) = ([ledger].into(), ["main".to_owned()].into());
    let rights = Rights { client: 7, ledgers, filesystems, read_only: false, squash: Squash::Root };
    Trust::Client(Arc::new(rights))
}

#[test]
fn users_of_a_machine_that_is_not_trusted_have_their_own_rights_only() {
    run("2+1", |world: Arc<World>| async move {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::new(&world, dir.path());
        let (host, guest) =
            (machine.client(&world).await, machine.client_trusted(&world, client_of(LEDGER)).await);
        let secret = create(&host, "secret").await;
        host.write(secret, 0, b"for root").await.unwrap();
        let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
        host.setattr(secret, mode(0o600)).await.unwrap();
        host.setattr(Ino::ROOT, mode(0o1777)).await.unwrap();
        host.fsync(secret).await.unwrap();
        let ann = guest.for_caller(Caller { uid: 1000, gid: 100, groups: vec![] });
        let ben = guest.for_caller(Caller { uid: 1001, gid: 100, groups: vec![] });
        assert_eq!(ann.open_file(secret, OpenIntent::Read).await.map(drop), Err(FsError::Denied));
        assert_eq!(read_all(&ann, secret).await, Err(FsError::Denied));
        assert_eq!(ann.unlink(Ino::ROOT, b"secret").await, Err(FsError::Denied));
        // The machine cannot leave the user out.
        assert_eq!(read_all(&guest, secret).await, Err(FsError::Denied));
        assert_eq!(guest.purge_step().await, Err(FsError::NotPermitted), "upkeep is not for guests");
        let make = client::MakeNode { uid: 1000, gid: 100, ..new_file("anns") };
        let ino = ann.make(make.clone()).await.unwrap().ino;
        ann.write(ino, 0, &pattern(3, 300_000)).await.unwrap();
        assert_eq!(ben.setattr(ino, mode(0o666)).await, Err(FsError::NotPermitted));
        assert_eq!(
            ben.make(client::MakeNode { name: b"bens".as_slice().into(), ..make }).await.map(drop),
            Err(FsError::NotPermitted)
        );
        ann.setattr(ino, mode(0o640)).await.unwrap();
        ann.fsync(ino).await.unwrap();
        let found = find(&host, "anns").await.unwrap();
        assert_eq!((found.uid, found.mode, found.size), (1000, 0o640, 300_000));
        assert!(read_all(&host, ino).await.unwrap() == pattern(3, 300_000));
    });
}

#[test]
fn clients_follow_a_ledger_that_is_opened_anew() {
    run("2+1", |world: Arc<World>| async move {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::new(&world, dir.path());
        let (one, two) = (machine.client(&world).await, machine.client(&world).await);
        let mut owner = world.owner.clone();
        let ino = create(&one, "file").await;
        one.write(ino, 0, &pattern(1, 50_000)).await.unwrap();
        let unnamed = create(&two, "unnamed").await;
        two.write(unnamed, 0, b"kept").await.unwrap();
        one.unlink(Ino::ROOT, b"unnamed").await.unwrap();
        for round in 2..5 {
            let (earlier, next_of) = (owner.clone(), world.clone());
            owner = tokio::task::spawn_blocking(move || next_of.take_over(&earlier)).await.unwrap();
            machine.serve(round, owner.clone());
            // What was written under the lease of the earlier owner is still there, and nobody else has written.
            one.write(ino, 50_000 * (round - 1), &pattern(round, 50_000)).await.unwrap();
            one.fsync(ino).await.unwrap();
        }
        let all = read_all(&two, ino).await.unwrap();
        for round in 1..5 {
            let from = 50_000 * (round as usize - 1);
            assert!(all[from..from + 50_000] == pattern(round, 50_000), "round {round}");
        }
        assert_eq!(read_all(&two, unnamed).await.unwrap(), b"kept");
        two.open_file(ino, OpenIntent::Read).await.unwrap();
        tokio::task::spawn_blocking(move || owner.stop()).await.unwrap();
    });
}

/// Longer than a drive may be silent before it counts as unreachable.
const ABSENCE: Duration = Duration::from_secs(7);

#[test]
fn while_the_machine_is_away_programs_wait_and_nothing_fails() {
    run("2+1", |world: Arc<World>| async move {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::new(&world, dir.path());
        let client = machine.client(&world).await;
        let mut owner = world.owner.clone();
        let old = create(&client, "old").await;
        client.write(old, 0, &pattern(1, 3_000_000)).await.unwrap();
        client.fsync(old).await.unwrap();
        let unnamed = create(&client, "unnamed").await;
        client.write(unnamed, 0, b"kept").await.unwrap();
        client.unlink(Ino::ROOT, b"unnamed").await.unwrap();
        let unsynced = create(&client, "unsynced").await;
        client.write(unsynced, 0, &pattern(2, 100_000)).await.unwrap();
        machine.leave();
        let working = |number: u64| {
            let client = client.clone();
            tokio::spawn(async move {
                let ino = create(&client, &format!("made {number}")).await;
                client.write(ino, 0, &pattern(number, 400_000)).await.unwrap();
                client.fsync(ino).await.unwrap();
                assert!(read_all(&client, old).await.unwrap() == pattern(1, 3_000_000));
            })
        };
        let works: Vec<_> = (10..13).map(working).collect();
        let synced = tokio::spawn({
            let client = client.clone();
            async move { client.fsync(unsynced).await }
        });
        tokio::time::sleep(ABSENCE).await;
        assert!(works.iter().all(|work| !work.is_finished()) && !synced.is_finished());
        let (earlier, next_of) = (owner.clone(), world.clone());
        owner = tokio::task::spawn_blocking(move || next_of.take_over(&earlier)).await.unwrap();
        machine.serve(2, owner.clone());
        for work in works {
            work.await.unwrap();
        }
        assert_eq!(synced.await.unwrap(), Ok(()));
        assert!(read_all(&client, unsynced).await.unwrap() == pattern(2, 100_000));
        assert_eq!(read_all(&client, unnamed).await.unwrap(), b"kept");
        assert_eq!(client.owed(100).await.unwrap(), [], "no drive was left out");
        tokio::task::spawn_blocking(move || owner.stop()).await.unwrap();
    });
}
