//! The planner on whole clusters: against an oracle that tries everything, and over long histories.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod oracle;
mod planner;

/// SplitMix64: repeatable choices from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from `least` to `most`.
    fn between(&mut self, least: u32, most: u32) -> u32 {
        least + (self.roll() % u64::from(most - least + 1)) as u32
    }

    /// True once in `of` times.
    fn once_in(&mut self, of: u32) -> bool {
        self.between(1, of) == 1
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.between(0, items.len() as u32 - 1) as usize]
    }
}
