//! A client that is no node, and asks for everything.

use super::*;
use crate::rights::Grant;

const PATIENCE: Duration = Duration::from_secs(5);

fn sink() -> Arc<dyn EventSink> {
    Arc::new(Sent(mpsc::unbounded_channel().0))
}

/// Whether a drive has executed it.
async fn executed(pair: &Pair, request: DriveRequest, grant: Option<&Grant>) -> bool {
    let asked = pair.peer.ask_drive::<_, DriveReply>(DRIVE, &request, grant.cloned(), PATIENCE).await;
    match asked {
        Err(CallError::Refused(Refusal::Forbidden)) => false,
        Ok(_) => true,
        Err(error) => panic!("{request:?}: {error}"),
    }
}

fn get(ledger: LedgerId, extent: u64) -> DriveRequest {
    DriveRequest::Get(GetShard {
        key: ShardKey { ledger, extent: ExtentId(extent), shard: ShardIndex(0) },
        first_block: 0,
        blocks: 1,
        purpose: GetPurpose::Read,
    })
}

fn delete(extents: &[u64]) -> DriveRequest {
    let key = |extent: &u64| put(*extent, 1).key;
    DriveRequest::Delete(extents.iter().map(key).collect::<Vec<_>>().into())
}

/// The range that the owner gave.
async fn granted(pair: &Pair) -> Grant {
    let owner = RemoteOwner::new(&pair.peer, LEDGER);
    owner.connect(sink()).await.unwrap();
    owner.call(id(1), MetaRequest::AllocExtents).await.unwrap();
    pair.peer.proofs().of_extent(LEDGER, ExtentId(100)).expect("it was proved")
}

#[test]
fn it_has_no_session_but_its_own() {
    run(async {
        let pair = Pair::trusting(client_of(LEDGER));
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        // There is such a session, of somebody else.
        assert_eq!(owner.call(id(1), beat(1)).await, Err(FsError::NotPermitted));
        let claim = Claim { in_use_ver: 9, more: true, ..Claim::default() };
        assert_eq!(
            owner.resume(SessionId(7), claim.clone(), sink()).await.err(),
            Some(FsError::NotPermitted)
        );
        owner.connect(sink()).await.unwrap();
        assert!(owner.call(id(2), beat(1)).await.is_ok());
        let other = Envelope::from(RequestId { session: SessionId(8), slot: 0, seq: 1 });
        assert_eq!(owner.call(other, beat(1)).await, Err(FsError::NotPermitted));
        let elsewhere = RemoteOwner::new(&pair.peer, LedgerId(4));
        assert!(elsewhere.connect(sink()).await.is_err());
        // Another process, which knows only by the proof that the session is the client's.
        *pair.server.lock().unwrap() = Server::new(&pair.env, services(&pair.owner, 2));
        pair.break_all.notify_waiters();
        owner.lost().await;
        let next = RemoteOwner::new(&pair.peer, LEDGER);
        assert_eq!(next.call(id(3), beat(1)).await, Err(FsError::NotPermitted));
        assert!(next.resume(SessionId(7), claim, sink()).await.is_ok());
        assert!(next.call(id(3), beat(1)).await.is_ok());
    });
}

#[test]
fn it_writes_only_what_it_was_given() {
    run(async {
        let pair = Pair::trusting(client_of(LEDGER));
        let grant = granted(&pair).await;
        let put_of = |extent| DriveRequest::Put(put(extent, 1));
        assert!(executed(&pair, put_of(100), Some(&grant)).await);
        assert!(executed(&pair, put_of(109), Some(&grant)).await);
        assert!(!executed(&pair, put_of(110), Some(&grant)).await, "behind the range");
        assert!(!executed(&pair, put_of(100), None).await, "without a proof");
        for forged in [
            Grant { count: 100, ..grant.clone() },
            Grant { first: ExtentId(0), count: u64::MAX, ..grant.clone() },
            Grant { proof: Bytes::from_static(&[0; 32]), ..grant.clone() },
            Grant { proof: Bytes::new(), ..grant.clone() },
        ] {
            assert!(!executed(&pair, put_of(111), Some(&forged)).await, "{forged:?}");
            assert!(!executed(&pair, put_of(100), Some(&Grant { first: ExtentId(99), ..forged })).await);
        }
        let foreign = PutShard { key: ShardKey { ledger: LedgerId(4), ..put(100, 1).key }, ..put(100, 1) };
        assert!(!executed(&pair, DriveRequest::Put(foreign), Some(&grant)).await, "of another filesystem");
        let repair = PutShard { purpose: PutPurpose::Repair, ..put(100, 1) };
        assert!(!executed(&pair, DriveRequest::Put(repair), Some(&grant)).await, "nobody gave it that work");
        // It would make the drive believe that the ledger has come so far.
        let position = Some(Position { ledger: LEDGER, lineage: base::Lineage(1), seq: base::Seq(u64::MAX) });
        assert!(executed(&pair, DriveRequest::Put(PutShard { position, ..put(101, 1) }), Some(&grant)).await);
        let server = pair.server.lock().unwrap().clone();
        let drive = server.services().drives[&DRIVE].clone();
        assert_eq!(drive.stat().live_bytes, 3, "what was refused was not written");
        // Another client was given this range.
        let other = Pair::trusting(Trust::Client(Arc::new(Rights { client: 8, ..rights_of(LEDGER) })));
        assert!(!executed(&other, put_of(100), Some(&grant)).await);
        // A client that only reads.
        let reader = Rights { read_only: true, ..rights_of(LEDGER) };
        let reader = Pair::trusting(Trust::Client(Arc::new(reader)));
        assert!(!executed(&reader, put_of(100), Some(&grant)).await);
    });
}

#[test]
fn it_takes_back_only_what_it_was_given_and_reads_only_its_filesystems() {
    run(async {
        let pair = Pair::trusting(client_of(LEDGER));
        let grant = granted(&pair).await;
        assert!(executed(&pair, delete(&[100, 101]), Some(&grant)).await);
        assert!(!executed(&pair, delete(&[100, 99]), Some(&grant)).await);
        assert!(!executed(&pair, delete(&[100]), None).await);
        assert!(executed(&pair, get(LEDGER, 5), None).await);
        assert!(!executed(&pair, get(LedgerId(4), 5), None).await);
        for request in [
            DriveRequest::KeepPositions { positions: Vec::new(), replace: true },
            DriveRequest::KnownLedgers,
            DriveRequest::List { after: None, limit: 3 },
            DriveRequest::Scrub { after: None, budget_bytes: 1 },
            DriveRequest::MakeRoom,
        ] {
            assert!(!executed(&pair, request, Some(&grant)).await);
        }
    });
}

#[test]
fn one_that_only_reads_changes_nothing() {
    run(async {
        let rights = Rights { read_only: true, ..rights_of(LEDGER) };
        let pair = Pair::trusting(Trust::Client(Arc::new(rights)));
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        owner.connect(sink()).await.unwrap();
        assert_eq!(owner.call(id(1), MetaRequest::AllocExtents).await, Err(FsError::ReadOnly));
        assert!(owner.call(id(2), MetaRequest::GetAttr { ino: Ino::ROOT }).await.is_ok());
    });
}

#[test]
fn its_sessions_end_with_its_right_to_the_filesystem() {
    run(async {
        let pair = Pair::trusting(client_of(LEDGER));
        let owner = RemoteOwner::new(&pair.peer, LEDGER);
        owner.connect(sink()).await.unwrap();
        assert!(owner.call(id(1), beat(1)).await.is_ok());
        // The process still knows that the session was its own.
        *pair.trust.lock().unwrap() = client_of(LedgerId(4));
        pair.break_all.notify_waiters();
        owner.lost().await;
        let next = RemoteOwner::new(&pair.peer, LEDGER);
        assert_eq!(next.call(id(2), beat(1)).await, Err(FsError::NotPermitted));
    });
}
