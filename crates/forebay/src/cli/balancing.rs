//! `fs balance`.

use std::path::Path;

use admin::{BalanceFilesystem, DriveShare, FilesystemBalance, SetNodes, Survives};
use anyhow::Result;
use base::units::format_duration;

use super::ask;
use super::output::{Format, bytes, print};

pub(super) fn balance(dir: &Path, name: &str, request: BalanceFilesystem, format: Format) -> Result<()> {
    let balance = ask(dir, |client| async move { client.balance(name, request).await })?;
    print(format, &balance, |balance| if request.abort { ended(balance) } else { forecast(balance) })
}

pub(super) fn set_nodes(dir: &Path, name: &str, request: &SetNodes, format: Format) -> Result<()> {
    let balance = ask(dir, |client| async move { client.set_nodes(name, request).await })?;
    print(format, &balance, forecast)
}

fn ended(balance: &FilesystemBalance) -> String {
    let FilesystemBalance { filesystem, groups, .. } = balance;
    format!(
        "{filesystem} is not balanced any more: {groups} placement groups go back to the drives that had them; what has moved \
         completely stays where it is"
    )
}

fn forecast(balance: &FilesystemBalance) -> String {
    let FilesystemBalance { filesystem, groups, move_bytes, eta_s, waits, .. } = balance;
    if *groups == 0 && !balance.balancing && waits.is_none() {
        return format!("{filesystem} is balanced: nothing is to be moved");
    }
    let happens = if balance.balancing { "is being balanced" } else { "would be balanced" };
    let mut text = format!(
        "{filesystem} {happens}: {groups} placement groups move, {}, {} at the present rate\n",
        bytes(*move_bytes),
        format_duration(*eta_s)
    );
    text += &uses(&balance.drives);
    let (now, after) = (survived(balance.survives), survived(balance.survives_after));
    text += &match now == after {
        true => format!("  {:<9} {now}\n", "survives"),
        false => format!("  {:<9} {now}; at the end {after}\n", "survives"),
    };
    if let Some(waits) = waits {
        text += &format!("  {:<9} {waits}\n", "waits");
    }
    text.trim_end().to_owned()
}

/// The use of the drives: the lowest and the highest.
fn uses(drives: &[DriveShare]) -> String {
    let range = |of: fn((u64, u64)) -> u64| {
        let percents = || drives.iter().map(|drive| of(drive.percent()));
        Some(format!("{} to {} %", percents().min()?, percents().max()?))
    };
    match (range(|(now, _)| now), range(|(_, after)| after)) {
        (Some(now), Some(after)) => format!("  {:<9} {now} full; at the end {after}\n", "drives"),
        _ => String::new(),
    }
}

fn survived(Survives { drives, nodes }: Survives) -> String {
    if drives < 0 {
        return "nothing: some data cannot be read now".to_owned();
    }
    let some = |count: i32, what: &str| match count {
        // Nothing is stored.
        i32::MAX => format!("all {what}s"),
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    format!("the loss of {} or {}", some(drives, "drive"), some(nodes.max(0), "node"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(id: u32, used_bytes: u64, used_after_bytes: u64) -> DriveShare {
        DriveShare { id, node: 1, capacity_bytes: 1000, used_bytes, used_after_bytes }
    }

    #[test]
    fn a_forecast_says_what_changes() {
        let mut balance = FilesystemBalance {
            filesystem: "main".to_owned(),
            groups: 12,
            move_bytes: 3 << 30,
            eta_s: 90,
            survives: Survives { drives: 2, nodes: 0 },
            survives_after: Survives { drives: 2, nodes: 1 },
            drives: vec![share(0, 600, 410), share(1, 590, 400), share(2, 0, 380)],
            ..FilesystemBalance::default()
        };
        let text = forecast(&balance);
        assert!(
            text.starts_with("main would be balanced: 12 placement groups move, 3.00 GiB, 1m30s"),
            "{text}"
        );
        assert!(text.contains("0 to 60 % full; at the end 38 to 41 %"), "{text}");
        assert!(text.contains("the loss of 2 drives or 0 nodes; at the end the loss of 2 drives or 1 node"));
        assert!(!text.contains("waits"), "{text}");
        (balance.balancing, balance.waits) = (true, Some("drive 3 is away".to_owned()));
        balance.survives_after = balance.survives;
        let text = forecast(&balance);
        assert!(
            text.contains("main is being balanced") && text.ends_with("waits     drive 3 is away"),
            "{text}"
        );
        assert!(!text.contains("0 nodes; at the end"), "{text}");
        balance.survives.drives = -1;
        assert!(forecast(&balance).contains("cannot be read now"));
        let nothing = FilesystemBalance { filesystem: "main".to_owned(), ..FilesystemBalance::default() };
        assert_eq!(forecast(&nothing), "main is balanced: nothing is to be moved");
    }
}
