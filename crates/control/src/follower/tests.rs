use base::env::Env;
use meta::log::MemLog;

use super::*;
use crate::{Cluster, NodeRecord, Plan, RoleRecord};

const NOW: Duration = Duration::ZERO;

async fn control() -> Control {
    let control = Control::open(&Env::real(), Arc::new(MemLog::new()), Arc::new(MemState::default()), None)
        .await
        .unwrap();
    let env = base::env::Env::real();
    let plan = Plan::new(Cluster::new(Control::new_cluster(&env)));
    let view = control.view().unwrap();
    let mut change = plan.change(&view);
    change.cluster(&plan.next().record);
    control.commit(change).await.unwrap();
    control
}

async fn add_role(control: &Control, name: &str, policy: &str) {
    let mut change = control.view().unwrap().change();
    change.role(&RoleRecord { name: name.to_owned(), policy: policy.to_owned() });
    control.commit(change).await.unwrap();
}

/// Asks until nothing is new. Returns how often something was.
async fn follow(follower: &mut Follower, control: &Control) -> u32 {
    let mut changed = 0;
    for _ in 0..1000 {
        let ClusterRequest::Records { known, epoch, after, .. } = follower.question() else { panic!() };
        let news = control.news((known, epoch), &after, NOW).await.unwrap();
        let is_end = !news.is_copy && news.seq == known;
        changed += u32::from(follower.take(news).unwrap());
        if is_end {
            return changed;
        }
    }
    panic!("it never ends");
}

fn seq_of(follower: &Follower) -> Seq {
    match follower.question() {
        ClusterRequest::Records { known, .. } => known,
        _ => panic!(),
    }
}

fn roles(follower: &Follower) -> Vec<String> {
    follower.view().unwrap().roles().unwrap().into_iter().map(|role| role.name).collect()
}

#[tokio::test]
async fn changes_and_removals_arrive_also_while_a_copy_does() {
    let control = control().await;
    let mut follower = Follower::default();
    assert_eq!(follow(&mut follower, &control).await, 1);
    assert_eq!(
        Cluster::of(&follower.view().unwrap()).unwrap(),
        Cluster::of(&control.view().unwrap()).unwrap()
    );
    add_role(&control, "a", "").await;
    add_role(&control, "b", "").await;
    follow(&mut follower, &control).await;
    assert_eq!(roles(&follower), ["a", "b"]);
    let mut change = control.view().unwrap().change();
    change.remove_role("a").node(&NodeRecord::new(base::NodeId(3), "n"));
    control.commit(change).await.unwrap();
    follow(&mut follower, &control).await;
    assert_eq!(roles(&follower), ["b"]);
    assert_eq!(follower.view().unwrap().nodes().unwrap().len(), 1);
    assert_eq!(seq_of(&follower), control.seq().unwrap());
}

#[tokio::test]
async fn a_large_copy_comes_in_parts_and_begins_anew_when_it_is_overtaken() {
    let control = control().await;
    let text = "x".repeat(NEWS_BYTES / 3);
    for name in 0..10 {
        add_role(&control, &format!("r{name}"), &text).await;
    }
    // What it knows is from another ledger: the owner does not know these changes.
    let ask = |follower: &Follower| match follower.question() {
        ClusterRequest::Records { known, epoch, after, .. } => ((known, epoch), after),
        _ => panic!(),
    };
    let mut follower = Follower::default();
    let (mut parts, mut restarts) = (0, 0);
    loop {
        let (known, after) = ask(&follower);
        restarts += u32::from(after.is_empty());
        let news = control.news(known, &after, NOW).await.unwrap();
        parts += 1;
        if follower.take(news).unwrap() {
            break;
        }
        if parts == 2 {
            add_role(&control, "late", "").await;
        }
    }
    assert_eq!(restarts, 2);
    assert!(parts > 4, "{parts}");
    assert_eq!(roles(&follower).len(), 11);
    assert_eq!(seq_of(&follower), control.seq().unwrap());
}

#[tokio::test]
async fn a_node_that_was_away_for_long_gets_all_records() {
    let control = control().await;
    let mut follower = Follower::default();
    follow(&mut follower, &control).await;
    let text = "x".repeat(1 << 20);
    for turn in 0..12 {
        add_role(&control, "r", &format!("{turn}{text}")).await;
    }
    let mut change = control.view().unwrap().change();
    change.remove_role("r");
    control.commit(change).await.unwrap();
    let ClusterRequest::Records { known, epoch, after, .. } = follower.question() else { panic!() };
    assert!(control.news((known, epoch), &after, NOW).await.unwrap().is_copy);
    follow(&mut follower, &control).await;
    assert!(roles(&follower).is_empty());
}

#[tokio::test(start_paused = true)]
async fn without_news_the_answer_says_so_in_time() {
    let control = Arc::new(control().await);
    let (seq, epoch) = (control.seq().unwrap(), control.records().epoch());
    let asked =
        tokio::time::timeout(RECORDS_WAIT_MAX * 2, control.news((seq, epoch), b"", Duration::MAX)).await;
    assert_eq!(asked.unwrap().unwrap(), RecordsNews { seq, epoch, ..RecordsNews::default() });
    let waiting = tokio::spawn({
        let control = control.clone();
        async move { control.news((seq, epoch), b"", RECORDS_WAIT_MAX).await.unwrap() }
    });
    tokio::task::yield_now().await;
    add_role(&control, "a", "").await;
    assert_eq!(waiting.await.unwrap().records.len(), 1);
}

#[tokio::test]
async fn after_another_owner_nothing_of_an_abandoned_history_is_left() {
    let log = Arc::new(MemLog::new());
    let control =
        Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
    add_role(&control, "kept", "").await;
    let mut follower = Follower::default();
    follow(&mut follower, &control).await;
    // The follower saw changes that the ledger has lost since.
    let lost = RecordsNews {
        seq: Seq(control.seq().unwrap().0 + 2),
        epoch: control.records().epoch(),
        records: vec![(
            Bytes::from(crate::ledger::KEYS.control_named(b'r', "lost")),
            Bytes::from_static(b"{\"name\":\"lost\",\"policy\":\"\"}"),
        )],
        ..RecordsNews::default()
    };
    follower.take(lost).unwrap();
    assert_eq!(roles(&follower), ["kept", "lost"]);
    let next = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
    for name in ["a", "b", "c"] {
        add_role(&next, name, "").await;
    }
    follow(&mut follower, &next).await;
    assert_eq!(roles(&follower), ["a", "b", "c", "kept"]);
}
