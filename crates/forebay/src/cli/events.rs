//! `events`: the events of the cluster.

use std::path::Path;

use anyhow::Result;
use wire::event::Event;

use super::args::EventsArgs;
use super::output::{print, table};
use super::{ask, env};

pub(super) fn events(dir: &Path, args: &EventsArgs) -> Result<()> {
    let mut events = ask(dir, |client| async move { client.events().await })?;
    let now_s = env().clock.wall_ns() / 1_000_000_000;
    events.retain(|event| is_asked_for(event, args, now_s));
    events.drain(..events.len().saturating_sub(args.lines));
    print(args.json.into(), &events, |events| text(events))
}

fn is_asked_for(event: &Event, args: &EventsArgs, now_s: i64) -> bool {
    let since_s = args.since.map_or(i64::MIN, |since_s| now_s.saturating_sub_unsigned(since_s));
    let holds = |text: &str| {
        let all = format!("{} {} {}", event.subject, event.kind, event.text);
        all.to_lowercase().contains(&text.to_lowercase())
    };
    event.severity >= args.severity && event.time_s >= since_s && args.find.as_deref().is_none_or(holds)
}

fn text(events: &[Event]) -> String {
    if events.is_empty() {
        return "no events\n".to_owned();
    }
    let mut table = table(&["TIME", "SEVERITY", "WHAT", "EVENT", ""]);
    for event in events {
        table.add_row([
            s3::format_instant(event.time_s),
            event.severity.to_string(),
            event.subject.clone(),
            event.kind.clone(),
            event.text.clone(),
        ]);
    }
    table.to_string()
}
