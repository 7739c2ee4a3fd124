//! A rebuild is spread over the machines: the more there are, the faster it is.

use sim::{Rebuild, rebuild};

/// Bytes per second that a machine sends, and receives: so few that nothing else matters.
const LINK: u64 = 500_000;

/// The rate of a rebuild, in parts of what one machine receives.
fn in_links(rebuild: &Rebuild) -> f64 {
    rebuild.rate() / LINK as f64
}

#[test]
fn the_more_machines_there_are_the_faster_is_a_rebuild() {
    let rebuilt = |machines, by_all| rebuild(machines, by_all, LINK).unwrap();
    let (three, six) = (rebuilt(3, true), rebuilt(6, true));
    let by_one = in_links(&rebuilt(6, false));
    println!("in parts of what one machine receives, after one is lost:");
    println!("of 3 {:.2}, of 6 {:.2}; of 6 by one {by_one:.2}", in_links(&three), in_links(&six));
    assert!(in_links(&six) >= 1.3 * in_links(&three));
    assert!(in_links(&six) >= 3.0 * by_one);
    for (forecast, left) in three.left.into_iter().chain(six.left) {
        let ratio = forecast.as_secs_f64() / left.as_secs_f64();
        assert!((0.8..=1.2).contains(&ratio), "forecast {forecast:?}, then {left:?}");
    }
}
